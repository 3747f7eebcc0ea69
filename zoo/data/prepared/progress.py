"""The progress bar of a preparation: bytes read, tokens written, and the time it will take."""

import contextlib
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class Bar(contextlib.AbstractContextManager["Bar"]):
    """A bar on the terminal, or nothing where `show` is False.

    `unfinished()` is the number of tokens in shards that are being written.
    """

    def __init__(self, num_bytes: int, unfinished: Callable[[], int], *, show: bool):
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            _Tokens(unfinished),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=2,
            disable=not show,
        )
        self._task = self._progress.add_task("tokenizing", total=num_bytes, tokens=0)
        self._tokens = 0

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, description: str) -> None:
        """Name what is done now."""
        self._progress.update(self._task, description=description)

    def add(self, num_bytes: int, tokens: int) -> None:
        """Count a finished shard."""
        self._tokens += tokens
        self._progress.update(self._task, advance=num_bytes, tokens=self._tokens)


class _Tokens(ProgressColumn):
    def __init__(self, unfinished: Callable[[], int]):
        super().__init__()
        self._unfinished = unfinished

    def render(self, task: Task) -> Text:
        tokens = task.fields["tokens"] + (0 if task.finished else self._unfinished())
        return Text(f"{tokens / 1e6:,.1f} M tokens")
