"""The zoo's claims about one GPU, checked by one command: `python -m benchmarks.gpu`."""

from benchmarks import stand_ins

if __name__ == "__main__":
    stand_ins.install()
    from benchmarks.gpu import command

    command.main()
