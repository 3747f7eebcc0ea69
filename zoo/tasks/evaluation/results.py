"""The results of a task's requests, kept in a file from which an evaluation resumes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.runs.journal import Journal, Values
from zoo.runs.journal import ResultsError as ResultsError
from zoo.tasks.evaluation.scorer import LogLikelihood

Result = LogLikelihood | str | list[float]
"""Of a request: its score, its text, or the probabilities of the classes."""


class Results:
    """The results so far of a task with this fingerprint, by the index of their request.

    See `Journal` for `path`, `fingerprint` and errors.
    """

    def __init__(self, path: Path | None, fingerprint: Mapping[str, Any]):
        self._journal = Journal(path, fingerprint)
        self.known = {at: _result(values) for at, values in self._journal.known.items()}

    def add(self, batch: Mapping[int, Result]) -> None:
        """Keep the results of a batch; they are on the disk when this returns."""
        self._journal.add({at: _plain(result) for at, result in batch.items()})
        self.known |= batch


def _plain(result: Result) -> Values:
    return [*result] if isinstance(result, LogLikelihood) else [result]


def _result(values: Values) -> Result:
    return values[0] if len(values) == 1 else LogLikelihood(*values)
