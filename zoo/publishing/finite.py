"""A check of the numbers of a loaded model."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from zoo import sharding
from zoo.sharding.axes import keystr


def check_finite(model: PyTree, folder: Path) -> None:
    """Raise a ValueError that names the first parameter with a NaN or an infinity."""
    floats, mesh = eqx.filter(model, eqx.is_inexact_array), sharding.mesh_of(model)
    check = jax.jit(
        lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree),
        out_shardings=None if mesh is None else sharding.replicated(mesh),
    )
    for path, is_finite in jax.tree_util.tree_leaves_with_path(jax.device_get(check(floats))):
        if not is_finite:
            raise ValueError(
                f"{folder}: {keystr(path)} has a NaN or an infinity: the model is damaged, or its "
                "training diverged; get it again, or take another --model"
            )
