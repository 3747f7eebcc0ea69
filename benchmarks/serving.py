"""Fine-tune a model, export it, and serve it in other engines: equal logits, equal greedy tokens.

pip install transformers ctranslate2
python -m benchmarks.serving

`lm-python` learns the first line of the documentation of functions of the standard library, and to
end there. The export is opened by the zoo, `transformers` and CTranslate2, each in a process of its
own. It fails where logits differ by more than the tolerance, or any token does, stops included.
"""

import inspect
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import tyro

import zoo
from benchmarks.engines import Engine, Name
from benchmarks.report import Table, provenance, save
from benchmarks.timing import SkippedError

MODULES = "argparse ast calendar csv datetime difflib functools heapq inspect json logging os pdb "
MODULES += "random shutil statistics string subprocess tarfile textwrap tokenize typing zipfile"


@dataclass(frozen=True)
class Config:
    """Serve an exported fine-tuned model in other engines."""

    model: Path | None = None
    """A folder that the zoo has exported, with its tokenizer; if not given, one is made."""
    steps: int = 40
    """Steps of fine-tuning."""
    engines: tuple[Name, ...] = ("zoo", "transformers", "ctranslate2")
    """Engines; differences are to the first."""
    num_prompts: int = 8
    """Prompts to continue, of different lengths, in one batch; none was trained on."""
    new_tokens: int = 64
    """The most tokens after each prompt."""
    tolerance: float = 1e-4
    """The largest difference of logits, in fp32."""
    results: Path = Path(__file__).parent / "results"
    """Where the table is saved."""

    def __post_init__(self) -> None:
        for name in ("steps", "num_prompts", "new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if len(self.engines) < 2 or len({*self.engines}) < len(self.engines):
            raise ValueError(f"engines={self.engines} must be two different ones at least")
        if self.model is not None and not (self.model / "tokenizer.json").is_file():
            raise ValueError(
                f"model={self.model} has no tokenizer.json: export one by "
                "zoo.save(folder, model, format='hf', tokenizer=tokenizer)"
            )


def main(config: Config) -> None:
    """Fine-tune, export, compare, print and save; exit with 1 where engines disagree."""
    completions = _documented()
    with tempfile.TemporaryDirectory() as folder:
        exported = config.model
        if exported is None:
            exported = _exported(config, completions[config.num_prompts :], Path(folder))
        tokenizer = zoo.tokenizer.load_tokenizer(exported)
        asked = [tokenizer.encode(x["prompt"]).tolist() for x in completions[: config.num_prompts]]
        table = compare(config, exported, asked)
    table.print()
    command = shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]])
    source = {"command": command, "date": date.today().isoformat(), **provenance()}
    save("serving", [table], source, config.results)
    sys.exit(bool(table.failures))


def compare(config: Config, folder: Path, prompts: list[list[int]]) -> Table:
    """The engines on a folder in Hugging Face's format, beside the first of them."""
    table = Table(f"an exported model served: {len(prompts)} prompts, greedy, fp32")
    wanted: tuple[list[np.ndarray], list[list[int]]] | None = None
    for name in config.engines:
        try:
            with Engine(name, folder) as engine:
                logits = engine.logits(prompts)
                tokens, _ = engine.generate(prompts, config.new_tokens, stop=True)
        except SkippedError as error:
            table.notes.append(f"{name}: skipped: {error}")
            continue
        wanted = wanted or (logits, tokens)
        apart = max(float(np.abs(a - b).max()) for a, b in zip(logits, wanted[0], strict=True))
        equal = sum(a == b for a, b in zip(tokens, wanted[1], strict=True))
        table.rows.append(
            {
                "peer": name,
                "largest difference of logits": f"{apart:.1e}",
                "equal continuations": f"{equal} of {len(prompts)}",
                "tokens": sum(map(len, tokens)),
                "ended by a stop": sum(len(x) < config.new_tokens for x in tokens),
            }
        )
        if not apart <= config.tolerance:
            table.failures.append(f"{name}: logits differ by {apart:.1e}")
        if equal < len(prompts):
            table.failures.append(f"{name}: {len(prompts) - equal} continuations differ")
    if len(table.rows) < 2:
        table.failures.append("nothing to compare: install transformers or ctranslate2")
    elif not any(row["ended by a stop"] for row in table.rows):
        table.failures.append("no continuation came to a stop: raise steps or new_tokens")
    return table


def _documented() -> list[dict[str, str]]:
    """Signatures of the standard library with the first line of each one's documentation."""
    found = {}
    for name in MODULES.split():
        module = __import__(name)
        for key, value in sorted(vars(module).items()):
            if inspect.isroutine(value) and not key.startswith("_") and inspect.getdoc(value):
                line = inspect.getdoc(value).strip().splitlines()[0]  # type: ignore[union-attr]
                found[f'def {key}():\n    """'] = f'{line}"""'
    lines = [{"prompt": key, "completion": value} for key, value in found.items()]
    return [lines[i] for i in np.random.default_rng(0).permutation(len(lines))]


def _exported(config: Config, completions: list[dict[str, str]], folder: Path) -> Path:
    """The fine-tuned model in Hugging Face's format."""
    (folder / "functions.jsonl").write_text("\n".join(map(json.dumps, completions)))
    flags = {
        "run-dir": folder / "run",
        "steps": config.steps,
        "data.files": folder / "functions.jsonl",
        "data.format": "completions",
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    subprocess.run([sys.executable, "-m", "recipes.finetune", *arguments], check=True)
    model = zoo.load(folder / "run")
    tokenizer = zoo.tokenizer.load_tokenizer(folder / "run" / "model")
    zoo.save(folder / "exported", model, format="hf", tokenizer=tokenizer)
    return folder / "exported"


if __name__ == "__main__":
    main(tyro.cli(Config))
