"""A convolutional network of one's own learns, resumes, and is the same on a mesh."""

import tempfile
from pathlib import Path

import jax
import numpy as np
import tyro

from recipes import cnn
from zoo.runs.metrics import read_metrics
from zoo.sharding.axes import is_parameter, logical_axes

FLAGS = ["--optimizer.schedule=constant", "--model.channels=8", "--log-every=1", "--steps=16"]
FLAGS += ["--precision=fp32", "--optimizer.learning-rate=0.02", "--optimizer.warmup-steps=0"]
folder = Path(tempfile.mkdtemp())


def train(name, *flags):
    """The losses of a run's steps."""
    args = [f"--run-dir={folder / name}", *FLAGS, "--compilation-cache=None", *flags]
    cnn.main(tyro.cli(cnn.Config, args=args))
    lines = read_metrics(folder / name / "metrics.jsonl")
    assert sum("eval_accuracy" in line for line in lines) >= 1
    return [line["loss"] for line in lines if "grad_norm" in line]


whole = train("whole")
assert len(whole) == 16
assert np.mean(whole[-4:]) < np.mean(whole[:4]) - 0.02, whole

# It stops and resumes as if it had not.
train("parts", "--steps=8")
assert train("parts") == whole
files = [(folder / name / "model.eqx").read_bytes() for name in ("whole", "parts")]
assert files[0] == files[1]

# It is the same on four devices, on which its matrices are cut.
for mesh in ("data=4", "fsdp=2,tensor=2"):
    np.testing.assert_allclose(train(mesh, f"--mesh={mesh}"), whole, rtol=1e-4)

# Its parameters have the names that its places in the network give them.
skeleton = jax.eval_shape(lambda key: cnn.CNN(cnn.CNNConfig(), key=key), jax.random.key(0))
axes = jax.tree.leaves(logical_axes(skeleton), is_leaf=lambda x: isinstance(x, tuple))
assert (None, None, "embed", "mlp") in axes, axes
assert all(map(is_parameter, jax.tree.leaves(skeleton)))
print("done")
