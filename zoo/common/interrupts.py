"""Ctrl-C while a program of ours still imports its modules."""

import os
import signal
import sys


def _leave(number: int, frame: object) -> None:
    os.write(2, b"\nstopped\n")
    os._exit(128 + number)


def leave_at_once() -> None:
    """From here on Ctrl-C ends a program of ours at once, until `as_usual`.

    A KeyboardInterrupt in the midst of an import may be swallowed there, and the program goes on.
    Other programs that import the zoo keep their own handling.
    """
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    if module and module[0].partition(".")[0] in ("zoo", "recipes"):
        signal.signal(signal.SIGINT, _leave)


def as_usual() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
