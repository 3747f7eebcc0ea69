"""A run: its folder and command line, its loop, its checkpoints, and what it shows of itself."""
