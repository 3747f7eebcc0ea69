"""Runs that are killed, and files that are damaged, for as long as told: `-m benchmarks.soak`."""

import tyro

from benchmarks.soak.command import Config, main

if __name__ == "__main__":
    main(tyro.cli(Config))
