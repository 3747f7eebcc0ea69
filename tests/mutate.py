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

# Each module's files of tests; those behind a bar run only for survivors of the ones before it.
TESTS = {
    "data/mixtures": "test_mixtures",
    "data/mixed_text": "test_mixed_text",
    "data/packing": "test_packing | test_token_datasets",
    "data/datasets": "test_datasets | test_loader",
    "data/prepared/format": "test_corpus | test_prepare",
    "alignment/pairs": "test_preferences -k 'not optimum and not gradient'",
    "data/prepared/hashes": "test_prepare",
    "data/prepared/opening": "test_opening | test_mixtures | test_mixed_text | test_text",
    "data/corpus": "test_corpus | test_mixed_text",
    "data/prepared/prepare": "test_prepare",
    "data/prepared/tokenizing": "test_prepare | test_text | test_rows",
    "data/chats": "test_chats | test_rows",
    "data/rows": "test_rows",
    "data/splits": "test_splits | test_formats",
    "data/formats": "test_formats | test_splits",
    "data/token_datasets": "test_token_datasets | test_packing",
    "data/labelled": "test_labelled | test_tags",
    "data/tags": "test_tags",
    "data/letters": "test_letters",
    "data/special_tokens": "test_tokenizer",
    "data/tokenizer": "test_tokenizer",
    "decoding/beam_search": "test_beam_search",
    "decoding/attention": "test_attention_cache | test_sampling | test_beam_search",
    "decoding/drawing": "test_sampling | test_speculative",
    "decoding/sampling": "test_sampling | test_speculative",
    "decoding/speculative": "test_speculative",
    "nn/attention/attention": "test_attention",
    "nn/attention/chunked": "test_attention | test_context_parallel -k is_that_of_whole_ones",
    "nn/attention/context_parallel": "test_context_parallel -k 'attention or heads or padding' "
    "| test_attention",
    "nn/attention/masks": "test_attention | test_context_parallel -k is_that_of_whole_ones",
    "nn/attention/ring": "test_context_parallel "
    "-k 'whole_ones or go_around or closed_form or dtype_of' | test_attention",
    "nn/grouped_products": "test_grouped_products",
    "nn/layers": "test_layers | test_precision test_moe test_transformer "
    "-k 'frozen or independent_numpy or every_parameter or logit_cap'",
    "nn/parameters": "test_precision test_sharding test_lora -k 'cast or gather or annotations "
    "or wrappers or frozen or foreign or rules_and or adapters_in_fp32 or draws_are' "
    "| test_matrix test_lora test_losses -k 'adapter_on_a or under_remat or chain_rule "
    "or steps_draw or tiles'",
    "nn/precision": "test_precision | test_step -k 'fp16 or bf16'",
    "nn/products": "test_precision -k 'product or matmul or bf16 or frozen or cast' "
    "| test_precision | test_products | test_int8_training | test_matrix "
    "| test_lora | test_moe",
    **dict.fromkeys(
        (f"nn/recurrences/{x}" for x in ("chunks", "gated_deltanet", "mamba2", "mlstm")),
        "test_recurrences | test_rnn -k 'delta or mamba2 or mlstm'",
    ),
    "nn/recurrences/marks": "test_rnn test_mixers -k 'padding_makes or match_separate or streamed "
    "or packed_documents or execution_options or truncation or recomputed_memory'",
    "nn/recurrences/mixers": "test_mixers test_rnn -k 'cannot_be or refused or flops or kinds_of "
    "or epsilon'",
    "nn/remat": "test_remat | test_mixers",
    "nn/table_parts": "test_layers",
    "publishing/models": "test_lora",
    "quantization/codes": "test_matrix | test_quantization",
    "quantization/int8_training": "test_int8_training | test_int8_training -m slow",
    "quantization/loading": "test_matrix -k 'loading or host or sharded or hugging or named'",
    "quantization/matrix": "test_matrix | test_quantization",
    "rnn/cells": "test_rnn -k 'pytorch or sequential_form or every_parameter' | test_rnn",
    "rnn/recurrence": "test_rnn",
    "runs/callbacks/evaluations": "test_evaluations "
    "| test_hooks -k named | test_own_programs -k unfit_metrics",
    "runs/checkpoint": "test_checkpoint",
    "runs/remote/copies": "test_copies | test_remote",
    "runs/remote/folder": "test_remote",
    "runs/remote/lease": "test_lease | test_remote",
    "common/store": "test_store | test_remote_models",
    "common/store_errors": "test_store_errors",
    "sharding/axes": "test_axes | test_sharding | test_optimizers",
    "sharding/mesh": "test_sharding",
    "sharding/placement": "test_sharding",
    "sharding/rules": "test_sharding | test_optimizers",
    "sharding/specs": "test_sharding",
    "tasks/mixtures": "test_mixtures",
    "training/chunked_loss": "test_losses | test_step -k logits_in_chunks",
    "alignment/distillation": "test_distillation -k 'not unfit and not go_together' "
    "| test_distillation | test_distillation -m slow",
    "training/loss_values": "test_loss_values -k 'accept or entries' "
    "| test_step -k 'malformed or reserved or plain_numbers or sums_without' "
    "| test_stateful -k 'refused or fourth or needs_no_new or leaves_its_states' "
    "| test_precision -k wrappers | test_own_programs -k 'metric or vector or divides'",
    "training/compiled": "test_compiled | test_step",
    "training/tiled_loss": "test_losses -k tiles",
    "training/losses": "test_losses | test_moe -k 'balanc or z_loss' | test_precision -k wrappers "
    "| test_step -k losses_of_sources",
    "training/optimizers": "test_optimizers | test_parametrization",
    "training/parametrization": "test_parametrization",
    "alignment/preferences": "test_preferences "
    "| test_finetuning -m slow -k preferences_are_learned",
    "training/state": "test_step -k 'not mesh' | test_sharding -k rules",
    "training/step": "test_step "
    "-k 'not transformer and not rnn and not mlp and not mesh' "
    "| test_lora -k 'frozen or train' | test_step -k transformer",
    "transformer/blocks": "test_transformer | test_mixers | test_moe | test_hf",
    "transformer/dispatch": "test_moe -k 'mesh or axis or exchange or devices'",
    "transformer/moe": "test_moe",
    "alignment/pair_losses": "test_preferences -k 'not optimum' | test_preferences",
    "alignment/policy": "test_policy",
    "data/masking": "test_masking",
    **{f"images/{x}": f"test_{x}" for x in ("attention_maps", "augmentation", "classes")},
    "images/processor": "test_processor",
    "mlp": "test_mlp",
    "transformer/encoder": "test_encoder | test_hf -k 'bert or minilm or esm'",
    "transformer/config": "test_transformer test_mixers test_moe test_latent "
    "-k 'invalid or defaults or cannot_be or kinds_of or have_a_mixer or refused or flops "
    "or every_parameter or latent'",
    "transformer/flops": "test_transformer test_mixers test_latent test_plan_command "
    "-k 'flops or operations or vision'",
    "transformer/latent": "test_latent | test_hf -k deepseek",
    "transformer/model": "test_transformer -k 'not flops and not rotary' "
    "| test_moe test_mixers -k 'balanc or z_loss or packed_documents' "
    "| test_hf -k 'gemma3 or bert or esm'",
    "transformer/rotary": "test_transformer -k 'rotary or rope or given_positions or wave' "
    "| test_hf test_rules -k 'llama3 or yarn or gpt_oss or ministral3 or phi3_short or glm4'",
    "transformer/row_orders": "test_moe",
    "transformer/vision": "test_vision | test_hf -k 'vit or siglip or dino'",
    "transformer/patches": "test_vision",
    "wrappers/classifier": "test_classifier",
    "wrappers/ensemble": "test_ensemble",
    "wrappers/retrained": "test_retrained | test_lora",
    "nn/stateful": "test_stateful | test_moe -k 'bias or load'",
    "wrappers/lora": "test_lora",
}

# What takes long to import, and starts none of JAX's devices.
LIBRARIES = ["equinox", "grain", "jaxtyping", "optax", "pytest", "tensorstore", "tokenizers"]
FLAGS = ["-n0", "-x", "-pno:cacheprovider", "--no-header", "-q", "--tb=line"]


def _file(word: str) -> str:
    """The path of a file of tests, by its name; any other word as it is."""
    if not word.startswith("test_"):
        return word
    (path,) = (ROOT / "tests").rglob(f"{word}.py")
    return path.relative_to(ROOT).as_posix()


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
        self.folder = folder
        self.arguments = [_file(x) for x in shlex.split(arguments)]
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
