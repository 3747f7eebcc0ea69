"""How many files one has to read to follow what users do: those whose code runs, with a ceiling.

`python tests/test_paths.py` prints them by name. A file counts when a function of it runs, not when
it is imported: every module is imported before.
"""

import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import zoo
from zoo import lora, losses, transformer
from zoo.data import loader, text
from zoo.nn.products import matmul
from zoo.runs.checkpoint import Checkpointer

ZOO = Path(zoo.__file__).parent
KEY = jax.random.key(0)
BATCH = {
    "tokens": np.zeros((2, 8), np.int32),
    "targets": np.ones((2, 8), np.int32),
    "weights": np.ones((2, 8), np.float32),
}


def logit(folder: Path) -> Callable[[], object]:
    """One call of a transformer."""
    config = transformer.Config(vocab_size=64, d_model=32, num_layers=2, num_heads=4)
    model = transformer.Transformer(config, key=KEY)
    return lambda: eqx.filter_jit(model)(BATCH["tokens"])


def row(folder: Path) -> Callable[[], object]:
    """From files of text to a batch of packed rows on the devices."""
    (folder / "a.txt").write_text("def f(x):\n    return x\n" * 100)
    (folder / "b.txt").write_text("import os\n" * 200)
    config = text.Config(
        files=f"{folder}/*.txt",
        tokenizer="bytes",
        seq_len=16,
        batch_size=2,
        cache=folder / "cache",
        held_out=0.5,
    )

    def tokenizer_folder(save: Callable[[Path], None]) -> Path:
        save(folder / "tokenizer")
        return folder / "tokenizer"

    def run() -> None:
        data = text.read_text(config, seed=0, tokenizer_folder=tokenizer_folder)
        next(iter(loader.batches(data.train, stop=1)))

    return run


def checkpoint(folder: Path) -> Callable[[], object]:
    """A save, and a restore of it."""
    state = {"w": jax.numpy.ones((4, 4)), "key": jax.random.key(1)}

    def run() -> None:
        checkpointer = Checkpointer(folder / "checkpoints")
        checkpointer.save(1, state, {"note": 1})
        checkpointer.close()
        restored = Checkpointer(folder / "checkpoints").restore(state)
        assert restored is not None
        assert restored[1] == 1

    return run


def load(folder: Path) -> Callable[[], object]:
    """A model of the shelf."""
    return lambda: zoo.load("lm-python")


def adapted(base: eqx.Module) -> tuple[zoo.TrainState, optax.GradientTransformation]:
    """The state of a training of adapters on a model."""
    optimizer = optax.adamw(1e-3)
    state = zoo.init_state(
        lambda key, model: lora.adapt(model, lora.Config(rank=2), key=key),
        optimizer,
        key=KEY,
        pretrained=base,
        trainable=lora.trainable,
    )
    return state, optimizer


def finetune(folder: Path) -> Callable[[], object]:
    """One step of adapters on a model of the shelf."""
    base = zoo.load("lm-python")

    def run() -> None:
        state, optimizer = adapted(base)
        step = zoo.make_train_step(losses.next_token, optimizer, trainable=lora.trainable)
        step(state, BATCH)

    return run


def adapters(folder: Path) -> Callable[[], object]:
    """Adapters on a model of the shelf, saved and loaded."""
    state, _ = adapted(zoo.load("lm-python"))

    def run() -> None:
        zoo.save_adapters(folder / "adapters", state.model, base="lm-python")
        zoo.load(folder / "adapters")

    return run


def int4_product(folder: Path) -> Callable[[], object]:
    """A product with a matrix in 4 bits, and the gradient of its input."""
    model = zoo.load("lm-python", quantize="int4")
    matrix = jax.tree.map(lambda x: x[0], model.blocks.mlp.w_up)
    x = jax.numpy.ones((2, matrix.shape[0]))
    return lambda: jax.jit(jax.grad(lambda x: matmul(x, matrix).sum()))(x)


# What has one file more raises its number here, in a commit that says why.
CEILINGS = {
    logit: 12,
    row: 17,
    checkpoint: 4,
    load: 21,
    finetune: 25,
    adapters: 34,
    int4_product: 3,
}


def files_run(function: Callable[[], object]) -> list[str]:
    """The files of zoo whose code the call runs, in this and in new threads."""
    for path in sorted(ZOO.rglob("*.py")):
        if path.parent.name == "evaluation":  # lm-eval takes seconds to import
            continue
        name = ".".join(("zoo", *path.relative_to(ZOO).with_suffix("").parts))
        importlib.import_module(name.removesuffix(".__init__"))
    for name in dir(zoo):  # looks up a public name once for the process
        getattr(zoo, name)
    seen: set[str] = set()

    def see(frame, event, argument) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    jax.clear_caches()  # what is traced before runs no code
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = (Path(name) for name in seen)
    return sorted(x.relative_to(ZOO).as_posix() for x in paths if x.is_relative_to(ZOO))


TRAINING = (finetune, adapters)  # which take longer


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param([x for x in CEILINGS if x not in TRAINING], id="short"),
        pytest.param(TRAINING, marks=pytest.mark.slow, id="training"),
    ],
)
def test_paths_take_few_files(paths: list[Callable], tmp_path: Path):
    assert files_run(lambda: None) == []
    for path in paths:
        (tmp_path / path.__name__).mkdir()
        files = files_run(path(tmp_path / path.__name__))
        assert 0 < len(files) <= CEILINGS[path], "\n".join((path.__name__, *files))


if __name__ == "__main__":
    for path in CEILINGS:
        with tempfile.TemporaryDirectory() as folder:
            names = files_run(path(Path(folder)))
            print(path.__name__, len(names), *names, sep="\n  ")
