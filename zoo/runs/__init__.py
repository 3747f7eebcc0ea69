"""A run: its folder and command line, its loop, its checkpoints, its metrics and progress."""
