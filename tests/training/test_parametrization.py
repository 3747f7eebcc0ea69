"""zoo.training.parametrization: muP's initial scales and rates, and what they are for."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import arrays, drawn_transformer, make_bert, make_transformer, token_batch
from jaxtyping import Array, Float

import zoo
from benchmarks import mup
from zoo import mlp, optimizers, rnn, sharding
from zoo.common import configuration
from zoo.sharding.axes import is_parameter, keystr
from zoo.training import parametrization
from zoo.training.parametrization import Factors
from zoo.training.state import Blueprint, standard_promotion
from zoo.wrappers.classifier import Classifier
from zoo.wrappers.ensemble import Ensemble

KEY = jax.random.key(0)
SAME = Factors(1, 1)
HIDDEN = Factors(1, 1 / 4)
OUTPUT = Factors(1 / 2, 1 / 4)
GAIN = Factors(1 / 4, 1 / 4)


def found(make_model: Callable[[Any], Any], base_width: int, **options: Any) -> dict[str, Factors]:
    """The factors of each parameter by its path, from its shapes alone."""
    skeleton = eqx.filter(eqx.filter_eval_shape(make_model, KEY), is_parameter)
    tree = parametrization.factors(skeleton, base_width, **options)
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Factors))
    return {keystr(path): factors for path, factors in leaves}


def make_mlp(**changes: Any) -> Callable[[Any], mlp.MLP]:
    config = mlp.Config(**{"in_size": 16, "out_size": 8, "hidden_size": 32, **changes})
    return lambda key: mlp.MLP(config, key=key)


def make_rnn(**changes: Any) -> Callable[[Any], rnn.RNN]:
    config = rnn.Config(**{"vocab_size": 64, "hidden_size": 32, **changes})
    return lambda key: rnn.RNN(config, key=key)


# The table


def test_transformer_factors():
    options: dict = {
        "bias": True,
        "positions.kind": "learned",
        "attention.qk_norm": "per_head",
        "mlp": "gelu",
    }
    by_path = found(make_transformer(**options, **{"attention.num_kv_heads": 4}), 8)
    hidden = {f"blocks.attention.{name}" for name in ("wq", "wk", "wv", "wo")}
    hidden |= {"blocks.mlp.w_up", "blocks.mlp.w_down"}
    assert {path for path, factors in by_path.items() if factors == HIDDEN} == hidden
    assert by_path.pop("head.weight") == OUTPUT
    rest = by_path.keys() - hidden
    assert {"embedding.weight", "position_embedding.weight", "final_norm.scale"} <= rest
    assert {"blocks.attention.bq", "blocks.attention.q_norm.scale", "blocks.mlp.b_up"} <= rest
    assert {by_path[path] for path in rest} == {SAME}


def test_experts_factors():
    by_path = found(make_transformer(**{"experts.num_experts": 4}), 8)
    assert by_path["blocks.mlp.router"] == OUTPUT
    assert by_path["blocks.mlp.w_gate"] == by_path["blocks.mlp.w_down"] == HIDDEN


def test_tied_embedding_is_divided_by_the_gain_before_it():
    by_path = found(
        make_transformer(tie_embeddings=True, bias=True, **{"residual.norm": "layer"}), 8
    )
    assert by_path["embedding.weight"] == SAME
    gain = {path for path, factors in by_path.items() if factors == GAIN}
    assert gain == {"final_norm.scale", "final_norm.bias"}
    by_path = found(make_rnn(tie_embeddings=True, norm="rms"), 8)
    assert {path for path, factors in by_path.items() if factors == GAIN} == {"layers.1.norm.scale"}


@pytest.mark.parametrize("cell", ["lstm", "gru", "elman", "mingru", "minlstm"])
def test_rnn_factors(cell: Any):
    by_path = found(make_rnn(cell=cell, bidirectional=True, embed_size=16), 8)
    matrices = {path for path in by_path if "weight_" in path}
    assert {by_path[path] for path in matrices} == {HIDDEN}
    assert len(matrices) == (4 if cell.startswith("min") else 8)
    assert by_path["head.weight"] == OUTPUT
    assert {by_path[path] for path in by_path.keys() - matrices - {"head.weight"}} == {SAME}
    by_path = found(make_rnn(cell=cell, vocab_size=None, in_size=3, out_size=2), 8)
    assert by_path["layers.0.directions.0.weight_ih"] == SAME
    assert by_path["layers.1.directions.0.weight_ih"] == HIDDEN


@pytest.mark.parametrize("cell", ["gated_deltanet", "mamba2", "mlstm"])
def test_factors_of_cells_with_a_matrix_as_state(cell: Any):
    by_path = found(make_rnn(cell=cell), 8)
    layers = {path: factors for path, factors in by_path.items() if path.startswith("layers.")}
    matrices = {path for path in layers if re.fullmatch(r".*\.w[a-z]{1,2}", path)}
    assert len(matrices) >= 12
    assert {layers[path] for path in matrices} == {HIDDEN}
    assert {layers[path] for path in layers.keys() - matrices} == {SAME}
    by_path = found(make_rnn(cell=cell, vocab_size=None, in_size=3, out_size=2), 8)
    assert by_path["layers.0.directions.0.wz"] == SAME
    assert by_path["layers.1.directions.0.wz"] == HIDDEN


@pytest.mark.parametrize("residual", [False, True])
def test_mlp_factors(residual: bool):
    by_path = found(make_mlp(num_layers=4, residual=residual, norm="layer"), 8)
    assert by_path["first.linear.weight"] == SAME
    assert by_path["head.weight"] == OUTPUT
    hidden = {path for path, factors in by_path.items() if factors == HIDDEN}
    plain = {"blocks.up.linear.weight", "blocks.down.linear.weight", "last.linear.weight"}
    assert hidden == ({"blocks.w_up", "blocks.w_down"} if residual else plain)


def test_factors_of_wrapped_models():
    make = make_bert(64, d_model=32, num_layers=2)
    by_path = found(lambda key: Classifier(make(key), 3, key=key), 8)
    assert by_path["body.blocks.attention.wq"] == HIDDEN
    assert by_path["body.type_embedding.weight"] == SAME
    assert by_path["head.weight"] == OUTPUT
    tied = make_transformer(tie_embeddings=True)
    # Under another head the embedding is an input alone.
    by_path = found(lambda key: Classifier(tied(key), 3, key=key), 8)
    assert by_path["body.final_norm.scale"] == SAME
    by_path = found(lambda key: Ensemble(tied, 2, key=key), 8)
    assert by_path["members.final_norm.scale"] == GAIN
    assert by_path["members.blocks.attention.wo"] == HIDDEN


def test_muon_rates_keep_the_spectral_condition():
    by_path = found(make_transformer(**{"experts.num_experts": 4}), 8, orthogonal=True)
    assert by_path["blocks.attention.wq"] == by_path["blocks.mlp.w_up"] == Factors(1, 1 / 2)
    assert by_path["blocks.mlp.router"] == OUTPUT
    assert by_path["head.weight"] == OUTPUT
    assert by_path["embedding.weight"] == SAME


# What is made of it


class Net(eqx.Module):
    """A parameter of every kind."""

    embedding: Float[Array, "vocab embed"]
    w_up: Float[Array, "embed mlp"]
    router: Float[Array, "embed routes"]
    scale: Float[Array, "embed"]
    head: Float[Array, "embed vocab"]

    def __init__(self, shift: float = 0.0) -> None:
        shapes = ((6, 4), (4, 8), (4, 2), (4,), (4, 6))
        names = ("embedding", "w_up", "router", "scale", "head")
        for name, shape in zip(names, shapes, strict=True):
            count = jnp.arange(np.prod(shape), dtype=jnp.float32)
            setattr(self, name, jnp.sin(count * count + shift).reshape(shape) + 0.1)


def updates_of(config: optimizers.Config) -> dict[str, np.ndarray]:
    """The second update, at a rate of its own schedule."""
    optimizer, model, grads = optimizers.make_optimizer(config, 10), Net(), Net(0.5)

    @jax.jit
    def second(grads: Any, model: Any) -> Any:
        _, state = optimizer.update(grads, optimizer.init(model), model)
        return optimizer.update(grads, state, model)[0]

    with standard_promotion():
        return {path: np.asarray(x) for path, x in arrays(second(grads, model)).items()}


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "adafactor", "muon"])
def test_mup_multiplies_updates_and_not_decay(name: Any):
    options: dict = {"name": name, "learning_rate": 0.3, "warmup_steps": 1}
    plain = updates_of(optimizers.Config(**options, weight_decay=0.0))
    scaled = updates_of(optimizers.Config(**options, parametrization="mup", base_width=1))
    decays = {"adam": set(), "muon": {"w_up", "router"}}.get(
        name, {"embedding", "w_up", "router", "head"}
    )
    hidden = 1 / 2 if name == "muon" else 1 / 4
    rates = {"embedding": 1, "scale": 1, "w_up": hidden, "router": 1 / 4, "head": 1 / 4}
    assert plain.keys() == rates.keys()
    for path, update in plain.items():
        decay = 0.3 * 0.1 * np.asarray(getattr(Net(), path)) if path in decays else 0.0
        np.testing.assert_allclose(
            scaled[path], update * rates[path] - decay, rtol=2e-5, atol=1e-6, err_msg=path
        )


def test_initial_values_are_scaled_on_a_mesh():
    config = optimizers.Config(parametrization="mup", base_width=8)
    optimizer, mesh = optimizers.make_optimizer(config, 10), zoo.make_mesh("fsdp=2,tensor=2")
    make_scaled = optimizers.initialise(config, make_mlp())
    plain, scaled = (
        zoo.init_state(make, optimizer, key=KEY, mesh=mesh) for make in (make_mlp(), make_scaled)
    )
    assert arrays(scaled.model).keys() == arrays(plain.model).keys()
    for path, x in arrays(plain.model).items():
        expected = x / 2 if path == "head.weight" else x
        np.testing.assert_allclose(arrays(scaled.model)[path], expected, atol=1e-6, err_msg=path)
    assert "tensor" in scaled.model.last.linear.weight.sharding.spec
    skeleton = Blueprint(make_scaled, optimizer, key=KEY, mesh=mesh).skeleton
    assert jax.tree.structure(skeleton) == jax.tree.structure(scaled)


@pytest.mark.parametrize("norm", ["rms", "rms_offset"])
def test_gain_of_a_tied_model_is_a_multiplier_of_its_logits(norm: Any, tmp_path: Path):
    drawn = drawn_transformer(tie_embeddings=True, num_layers=1, **{"residual.norm": norm})
    config = optimizers.Config(parametrization="mup", base_width=8)
    model = optimizers.initialise(config, lambda key: drawn)(KEY)
    zoo.save(tmp_path / "model", model)
    tokens = jnp.asarray(token_batch(rows=2)["tokens"])
    logits = eqx.filter_jit(lambda model: model(tokens))
    np.testing.assert_allclose(logits(model), logits(drawn) / 4, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(logits(zoo.load(tmp_path / "model")), logits(model))


# What it is for

TIED = {"tie_embeddings": True, "residual.norm": "layer"}


@pytest.mark.slow
def test_coordinates_of_a_transformer_stay():
    """The mean |x| of each layer's output, over steps and widths; logits by their change."""
    settings = mup.Config(base_width=32, head_dim=16)
    batches = [token_batch(seed=seed) for seed in range(5)]
    spreads: dict[str, list[float]] = {}
    for name in mup.PARAMETRIZATIONS:
        by_width = []
        for width in (32, 128):
            model = configuration.replaced(mup.model_config(settings, width, 64), TIED)
            options: dict = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 2e-3}
            rule = mup.rule(settings, width, name, **options)
            by_width.append(mup.coordinates(model, rule, batches, 2)["scale"])
        layers = [part for part in by_width[0][0] if part != "logits"]
        assert len(layers) == 3
        spreads[name] = [
            mup.spread([scale[step][part] for scale in by_width])
            for part in layers
            for step in range(len(batches) + 1)
        ]
    assert max(spreads["mup"]) < 1.2
    assert max(spreads["standard"]) > 1.5


# Refusals


def test_models_without_a_counterpart_are_refused():
    def refused(make_model: Any, base_width: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            found(make_model, base_width)

    refused(
        make_transformer(num_heads=2, **{"attention.head_dim": 16}),
        8,
        "2 heads at a width of 32 are 0.5 at",
    )
    refused(
        make_transformer(**{"attention.num_kv_heads": 1}),
        8,
        "1 kv_heads at a width of 32 are 0.25 at",
    )
    refused(
        make_transformer(**{"residual.scale_embedding": True}), 8, "scale_embedding=True multiplies"
    )
    refused(make_rnn(tie_embeddings=True), 8, "tie_embeddings=True: .* norm='none'")
    refused(lambda key: jnp.zeros(3), 8, "has no axis of that name")

    class Unnamed(eqx.Module):
        weight: Float[Array, "embed mlp"]
        other: Float[Array, "*shape"]
        axes: tuple = eqx.field(static=True, default=(("*shape", ""),))

    matrix = jnp.zeros((4, 4))
    refused(lambda key: Unnamed(matrix, matrix), 8, "other of shape .* can't tell whether")
    # Its outputs come first, and its place is not known.
    linear = eqx.nn.Linear(4, 4, key=KEY)
    refused(lambda key: [Unnamed(matrix, None), linear], 8, "1.weight .* named by eqx.nn.Linear")
    with sharding.use(zoo.Layout(axes={"1.weight": "classes embed"})):
        refused(lambda key: [Unnamed(matrix, None), linear], 8, "1.weight .* named by given")
    with sharding.use(zoo.Layout(axes={"1.weight": "mlp embed"})):
        assert found(lambda key: [Unnamed(matrix, None), linear], 1)["1.weight"] == HIDDEN

    class Two(eqx.Module):
        first: Float[Array, "embed"]
        second: Float[Array, "embed"]

    refused(lambda key: Two(jnp.zeros(2), jnp.zeros(3)), 8, r"the Two has 'embed' of \[2, 3\]")

    class Narrow(eqx.Module):
        weight: Float[Array, "features classes"]

    refused(lambda key: Narrow(jnp.zeros((2, 3))), 8, "the Narrow has no axis of that name")


def test_pretrained_models_are_refused():
    config = optimizers.Config(parametrization="mup", base_width=8)
    make_model = optimizers.initialise(config, lambda key, model: model)
    optimizer = optimizers.make_optimizer(config, 10)
    with pytest.raises(ValueError, match="choose 'standard'"):
        zoo.init_state(make_model, optimizer, key=KEY, pretrained=make_mlp()(KEY))
