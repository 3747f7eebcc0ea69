"""Runs that are killed, and files that are damaged, at random: `python -m benchmarks.soak`."""

import tyro

from benchmarks.soak.command import Config, main

if __name__ == "__main__":
    main(tyro.cli(Config))
