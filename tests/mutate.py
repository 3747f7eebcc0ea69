"""How well the tests bite: change one small thing in a module of zoo, and see whether they fail.

    python tests/mutate.py nn/attention/chunked sharding/axes --count 30 --seed 0
    python tests/mutate.py nn/attention/chunked --seed 0 --only 7       # one mutant again

Mutants are made in a copy of the checkout. The same seed gives the same ones, as long as the module
stays as it is, and a larger `--count` adds to those of a smaller. Each runs in a fork of a process
that has imported JAX and not zoo; tests that were quick and have killed before come first, and one
compilation cache (`JAX_COMPILATION_CACHE_DIR`, else a folder that goes at the end) serves all.
"""

import argparse
import collections
import contextlib
import importlib
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mutants import Mutant, mutants

ROOT = Path(__file__).parents[1]

# Each module's tests; those behind a bar run only for what has survived the ones before it.
TESTS = {
    "data/mixtures/leaks": "tests/test_mixtures.py | tests/test_mixed_text.py",
    "data/mixtures/plan": "tests/test_mixtures.py | tests/test_mixed_text.py",
    "data/mixtures/schedule": "tests/test_mixtures.py",
    "data/mixtures/spec": "tests/test_mixtures.py",
    "data/mixtures/text": "tests/test_mixed_text.py | tests/test_mixtures.py",
    "data/packing": "tests/test_data.py | tests/test_completions.py",
    "data/permutation": "tests/test_permutation.py",
    "data/preferences": "tests/test_preferences.py -k 'not optimum and not gradient'",
    "data/prepared/agreement": "tests/test_prepared_text.py | tests/test_mixed_text.py",
    "data/prepared/choice": "tests/test_prepared_text.py | tests/test_text.py",
    "data/prepared/hashes": "tests/test_prepare.py",
    "data/prepared/parts": "tests/test_parts.py | tests/test_mixed_text.py",
    "data/prepared/prepare": "tests/test_prepare.py",
    "data/prepared/rows": "tests/test_prepared_plans.py",
    "data/prepared/shards": "tests/test_parts.py",
    "data/prepared/tokenizing": "tests/test_prepare.py",
    "data/completions": "tests/test_completions.py | tests/test_chats.py | tests/test_rows.py",
    "data/rows": "tests/test_rows.py",
    "data/sources/lines": "tests/test_sources.py",
    "data/sources/sample": "tests/test_sources.py -k sample",
    "data/sources/splits": "tests/test_sources.py",
    "data/sources/tables": "tests/test_sources.py",
    "data/special_tokens": "tests/test_tokenizer.py | tests/test_completions.py",
    "data/token_plans": "tests/test_data.py | tests/test_prepared_plans.py",
    "data/tokenizer": "tests/test_tokenizer.py",
    "decoding/beam_search": "tests/test_beam_search.py",
    "decoding/cache": "tests/test_cache.py | tests/test_generate.py | tests/test_beam_search.py",
    "decoding/sampling": "tests/test_generate.py",
    "decoding/speculative": "tests/test_speculative.py",
    "nn/attention/chunked": "tests/test_attention.py",
    "nn/attention/context_parallel": "tests/test_context.py -k 'attention or heads or padding' "
    "| tests/test_attention.py",
    "nn/precision": "tests/test_precision.py | tests/test_train.py -k 'fp16 or bf16'",
    "nn/products": "tests/test_precision.py | tests/test_train.py -k 'fp16 or bf16'",
    "nn/remat": "tests/test_remat.py",
    "publishing/adapters": "tests/test_lora.py",
    "rnn/cells": "tests/test_rnn.py",
    "rnn/recurrence": "tests/test_rnn.py",
    "rnn/time": "tests/test_rnn.py",
    "runs/callbacks/average": "tests/test_callbacks.py -k 'average or decay'",
    "runs/checkpoint": "tests/test_checkpoint.py",
    "runs/remote/copier": "tests/test_remote.py",
    "runs/remote/copies": "tests/test_remote.py",
    "runs/remote/folder": "tests/test_remote.py",
    "runs/remote/lease": "tests/test_remote.py",
    "runs/remote/store": "tests/test_remote.py",
    "sharding/axes": "tests/test_sharding.py | tests/test_optimizers.py",
    "sharding/constraints": "tests/test_sharding.py",
    "sharding/kinds": "tests/test_sharding.py | tests/test_optimizers.py",
    "sharding/mesh": "tests/test_sharding.py",
    "sharding/placement": "tests/test_sharding.py",
    "sharding/rules": "tests/test_sharding.py",
    "sharding/specs": "tests/test_sharding.py",
    "tasks/mixtures": "tests/test_mixtures.py",
    "training/chunked_loss": "tests/test_losses.py | tests/test_train.py -k logits_in_chunks",
    "training/distillation": "tests/test_distillation.py -k 'not unfit and not go_together'",
    "training/losses": "tests/test_losses.py | tests/test_moe.py -k balanc",
    "training/optimizers": "tests/test_optimizers.py | tests/test_parametrization.py",
    "training/parametrization": "tests/test_parametrization.py",
    "training/preferences": "tests/test_preferences.py",
    "training/state": "tests/test_train.py -k 'not mesh' | tests/test_sharding.py -k rules",
    "training/step": "tests/test_train.py "
    "-k 'not transformer and not rnn and not mlp and not mesh' "
    "| tests/test_lora.py -k 'frozen or train' | tests/test_train.py -k transformer",
    "transformer/dispatch": "tests/test_moe.py -k 'mesh or axis or exchange or devices'",
    "transformer/moe": "tests/test_moe.py",
    "wrappers/lora": "tests/test_lora.py",
}

# What takes long to import, and starts none of JAX's devices.
LIBRARIES = ["equinox", "grain", "jaxtyping", "optax", "orbax.checkpoint", "pytest", "tokenizers"]
FLAGS = ["-n0", "-x", "-pno:cacheprovider", "--no-header", "-q", "--tb=line"]


class Order:
    """A pytest plugin: quick tests that have killed go first; notes how long each one takes."""

    def __init__(self, seconds: dict[str, float], kills: collections.Counter):
        self.seconds, self.kills = seconds, kills
        self.notes: dict[str, Any] = {"seconds": collections.Counter(), "failed": []}

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda x: self.seconds.get(x.nodeid, 0) / (1 + self.kills[x.nodeid]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.notes["seconds"][report.nodeid] += report.duration
        if report.failed:
            self.notes["failed"].append(report.nodeid)


class Suite:
    """Some tests in a copy of the checkout."""

    def __init__(self, folder: Path, arguments: str):
        self.folder, self.arguments = folder, shlex.split(arguments)
        self.seconds: dict[str, float] = {}
        self.kills: collections.Counter = collections.Counter()
        self.limit = 600.0

    def start(self) -> None:
        """Run them as they are, and once more with all compiled."""
        for _ in range(2):
            began = time.monotonic()
            failed = self.run()
            if failed:
                log = (self.folder / "log").read_text()[-3000:]
                raise SystemExit(f"without a mutant: {failed}\n{log}")
        total = time.monotonic() - began
        self.limit = 20 + 5 * total
        _say(f"{total:.0f} s for {' '.join(self.arguments)}")

    def run(self) -> list[str]:
        """What failed: nothing, tests by name, "timeout" or, before any test, "error"."""
        notes = self.folder / "notes"
        notes.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            self._child()
        deadline = time.monotonic() + self.limit
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what the tests have started
        if ended[0] == 0:
            os.waitpid(child, 0)
            return ["timeout"]
        noted = json.loads(notes.read_text()) if notes.exists() else {"seconds": {}, "failed": []}
        if ended[1] == 0:
            self.seconds |= noted["seconds"]
            return []
        self.kills.update(noted["failed"])
        return noted["failed"] or ["error"]

    def _child(self) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            os.chdir(self.folder)
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.path.insert(0, str(self.folder))
            os.environ["PYTHONPATH"] = str(self.folder)
            import pytest

            order = Order(self.seconds, self.kills)
            code = int(pytest.main([*FLAGS, *self.arguments], plugins=[order]))
            Path("notes").write_text(json.dumps(order.notes))
        finally:
            sys.stdout.flush()
            os._exit(code)


def try_all(module: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """The module's row of the table, and a paragraph for each survivor."""
    path = f"zoo/{module}.py"
    source = (ROOT / path).read_bytes()
    suites = [Suite(folder, arguments) for arguments in TESTS[module].split("|")]
    found = list(enumerate(mutants(path, source, options.seed)))
    chosen = [found[number] for number in options.only or ()] or found[: options.count]
    timeouts, survivors = 0, []
    for number, mutant in chosen:
        failed = _try_one(mutant, number, suites)
        timeouts += failed == ["timeout"]
        if not failed:
            survivors.append(f"\n`--seed {options.seed} --only {number}`\n\n{mutant.diff()}")
    (folder / path).write_bytes(source)
    killed = len(chosen) - len(survivors)
    return [f"| {module} | {len(chosen)} | {killed} | {len(survivors)} | {timeouts} |", *survivors]


def _try_one(mutant: Mutant, number: int, suites: list[Suite]) -> list[str]:
    failed = []
    for index, suite in enumerate(suites):
        file = suite.folder / mutant.path
        if not suite.seconds:
            file.write_bytes(mutant.source)
            suite.start()
        file.write_bytes(mutant.mutated())
        # Python tells its compiled code by the file's time in seconds and size: never alike here.
        os.utime(file, (0, 1_000_000 * (index + 1) + number))
        began = time.monotonic()
        if failed := suite.run():
            break
    how = f"killed by {failed[0]}" if failed else f"survived\n{mutant.diff()}\n"
    _say(f"{mutant.path} {number}: {time.monotonic() - began:.0f} s, {how}")
    return failed


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _copy(folder: Path) -> None:
    """The checkout with what is not committed yet."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "modules", nargs="+", choices=TESTS, metavar="MODULE", help=", ".join(TESTS)
    )
    parser.add_argument("--count", type=int, default=30, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="mutants of that seed by number")
    options = parser.parse_args()
    rows, survivors = ["| module | mutants | killed | survived | timeouts |", "|---" * 5 + "|"], []
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        folder = Path(name).resolve() / "zoo"
        _copy(folder)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{name}/compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        runpy.run_path(str(ROOT / "tests/conftest.py"))  # the flags that JAX reads at its import
        for library in LIBRARIES:
            importlib.import_module(library)
        for module in options.modules:
            row, *found = try_all(module, options, folder)
            rows.append(row)
            survivors += found
    print("\n".join([*rows, *survivors]))


if __name__ == "__main__":
    main()
