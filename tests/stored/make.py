"""Makes the models and runs of this folder, which later versions of the zoo have to open.

    cp -r tests/stored /tmp && PYTHONPATH=$PWD python /tmp/stored/make.py

The copy is needed because checkpoints hold their own path.

What lies here was written by version 0.1.0 of 2026-11-22, before the modules of the zoo moved.
Each run has two of its four steps behind it; `expected.json` has what that version came to.
"""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import zoo
from zoo import bert, ensemble, lora, mlp, rnn, transformer

HERE = Path(__file__).parent
KEY = jax.random.key(0)
TOKENS = jnp.asarray([[1, 5, 2, 7, 3, 0, 4, 6]], jnp.int32)
COMMON = ["--precision", "fp32", "--log-every", "1", "--compilation-cache", "None"]
SMALL = ["--data.tokenizer", "bytes", "--data.batch-size", "4", "--sample-tokens", "4"]
RUNS = {
    "lm": [
        *["--data", "text.txt", "--data.seq-len", "32", "--data.held-out", "0.3", *SMALL],
        *["--model.d-model", "16", "--model.num-layers", "2", "--model.num-heads", "2"],
    ],
    "rnn": [
        *["--data", "text.txt", "--data.documents", "files", "--data.buckets", "16", "32"],
        *["--data.held-out", "0.3", *SMALL],
        *["--model.hidden-size", "16", "--model.embed-size", "8"],
    ],
    "mlp": [
        *["--data", "rows.csv", "--data.label", "kind", "--data.batch-size", "8"],
        *["--model.hidden-size", "16"],
    ],
    "finetune": [
        *["--model", "models/transformer", "--method", "lora", "--lora.rank", "2"],
        *["--data", "text.txt", "--data.seq-len", "32", "--data.held-out", "0.3", *SMALL],
    ],
}


def models() -> dict[str, eqx.Module]:
    """A small model of each family, and of what stands on one."""
    text = transformer.Config(
        vocab_size=260,
        d_model=16,
        num_layers=2,
        num_heads=2,
        norms="both",
        rope_scaling=(8.0, 1.0, 4.0, 64.0),
        max_seq_len=64,
    )
    digits = mlp.Config(in_size=3, out_size=2, hidden_size=8, norm="layer")
    words = bert.Config(vocab_size=16, d_model=16, num_layers=1, num_heads=2, max_seq_len=16)
    cells = rnn.Config(vocab_size=16, hidden_size=8, num_layers=2, cell="gru")
    return {
        "transformer": transformer.Transformer(text, key=KEY),
        "mlp": mlp.MLP(digits, key=KEY),
        "bert": bert.BERT(words, key=KEY),
        "rnn": rnn.RNN(cells, key=KEY),
        "ensemble": ensemble.Ensemble(lambda key: mlp.MLP(digits, key=key), 3, key=KEY),
        "classifier": zoo.Classifier(rnn.RNN(cells, key=KEY), 2, key=KEY),
    }


def outputs(model: eqx.Module) -> list[float]:
    """The first numbers that a model gives."""
    takes_rows = isinstance(model, mlp.MLP | ensemble.Ensemble)
    result = model(jnp.asarray([[0.5, -1.0, 2.0]])) if takes_rows else model(TOKENS)
    return np.asarray(result).ravel()[:8].tolist()


def main() -> None:
    """Write all of it anew."""
    for name in ("models", "runs"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    random = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ran"]
    lines = [" ".join(random.choice(words, 6)) for _ in range(40)]
    rows = [f"{a:.3f},{b:.3f},{int(a > b)}" for a, b in random.normal(size=(60, 2))]
    (HERE / "rows.csv").write_text("\n".join(["a,b,kind", *rows]) + "\n")
    (HERE / "text.txt").write_text("\n".join(lines) + "\n")
    expected: dict[str, dict[str, list[float]]] = {"models": {}, "runs": {}}
    with contextlib.chdir(HERE):
        for name, model in models().items():
            zoo.save(f"models/{name}", model)
            expected["models"][name] = outputs(model)
        zoo.tokenizer.get_tokenizer("bytes").save(Path("models/transformer"))
        adapted = lora.adapt(zoo.load("models/transformer"), lora.Config(rank=2), key=KEY)
        adapted = jax.tree.map(lambda x: x + 0.01 if eqx.is_array(x) else x, adapted)
        with contextlib.chdir("models"):  # where the base is not: it is stored as it is given
            lora.save("adapters", adapted, base="models/transformer")
        expected["models"]["adapters"] = outputs(zoo.load("models/adapters"))
        for name, flags in RUNS.items():
            run = [sys.executable, "-m", f"recipes.{name}", "--run-dir", f"runs/{name}"]
            subprocess.run([*run, *COMMON, *flags, "--steps", "2"], check=True)
            shutil.copytree(f"runs/{name}", "continued")
            run[-1] = "continued"
            subprocess.run([*run, *COMMON, *flags, "--steps", "4"], check=True)
            found = map(json.loads, Path("continued/metrics.jsonl").read_text().splitlines())
            losses = [line["loss"] for line in found if "grad_norm" in line]
            expected["runs"][name] = losses
            shutil.rmtree("continued")
            for path in ("model", "adapters"):  # like those in `models`
                shutil.rmtree(f"runs/{name}/{path}", ignore_errors=True)
            for picture in Path(f"runs/{name}").glob("*.png"):
                picture.unlink()
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
