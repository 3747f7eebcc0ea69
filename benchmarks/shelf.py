"""Evaluate the language models of the shelf on the zoo's own tasks, beside chance.

python -m benchmarks.shelf

Each row comes from `python -m zoo eval`. The functions are those of the running Python's standard
library in the files that the models were not trained on, so that figures of one version of Python
compare with each other.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import Table, main
from zoo.data.tokenizer import FILE_NAME
from zoo.evaluation.standard_library import TASKS
from zoo.publishing.shelf import published

METRICS = {"python-bodies": ("acc", "acc_norm"), "python-signatures": ("exact_match",)}


def shelf(limit: int | None = None) -> list[Table]:
    """Evaluate the language models of the shelf on the zoo's own tasks.

    Args:
        limit: number of first examples of each task to take; all if not given.
    """
    table = Table("the zoo's own tasks, fp32, no shots")
    for name, card in published().items():
        if (card.folder / FILE_NAME).is_file():
            table.rows += _rows(name, limit)
    table.notes.append(
        "chance: of four bodies, one at random; of signatures, always the most frequent answer"
    )
    return [table]


def _rows(model: str, limit: int | None) -> list[dict[str, Any]]:
    flags = [f"--task={name}" for name in METRICS]
    flags += [] if limit is None else [f"--limit={limit}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "zoo", "eval", model, *flags, f"--out={folder}"]
        subprocess.run([*command, "--precision=fp32"], check=True)
        [results] = Path(folder).glob("results_*.json")
        found = json.loads(results.read_text())
    return [
        {
            "model": model,
            "task": task,
            "examples": found["n-samples"][task]["effective"],
            "metric": metric,
            "value": found["results"][task][f"{metric},none"],
            "± s.e.": found["results"][task][f"{metric}_stderr,none"],
            "chance": chance(TASKS[task]()[:limit]),
        }
        for task, metrics in METRICS.items()
        for metric in metrics
    ]


def chance(records: list[dict[str, Any]]) -> float:
    """The share of right answers without a model: by drawing one, or always the most frequent."""
    if "choices" in records[0]:
        return sum(1 / len(record["choices"]) for record in records) / len(records)
    return Counter(record["target"] for record in records).most_common(1)[0][1] / len(records)


if __name__ == "__main__":
    main(shelf)
