"""Runs a recipe, and appends a digest of each batch that it takes to a file.

python tests/record_batches.py recipes.lm FILE [the recipe's flags]
"""

import hashlib
import importlib
import json
import sys

import numpy as np

import zoo.runs.loop
from zoo.runs.command_line import cli


def record_batches(path: str) -> None:
    batches = zoo.runs.loop.batches

    def recorded(dataset, *arguments, **named):
        with open(path, "a") as file:
            for k, batch in batches(dataset, *arguments, **named):
                digest = hashlib.sha256()
                for name in sorted(batch):
                    digest.update(name.encode() + np.asarray(batch[name]).tobytes())
                dataset_and_k = f"{dataset.batches_per_epoch} batches per epoch, batch {k}"
                file.write(json.dumps([dataset_and_k, digest.hexdigest()]) + "\n")
                file.flush()
                yield k, batch

    zoo.runs.loop.batches = recorded


if __name__ == "__main__":
    module, path = sys.argv[1:3]
    del sys.argv[1:3]
    record_batches(path)
    recipe = importlib.import_module(module)
    cli(recipe.Config, recipe.main, module)
