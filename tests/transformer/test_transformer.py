"""zoo.transformer: numbers from an independent forward pass, causality, and every option."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import VOCAB, arrays, drawn_transformer, make_transformer, small_config, token_batch
from jaxtyping import Array, TypeCheckError

from zoo import losses, transformer
from zoo.nn.stateful import cast
from zoo.transformer import blocks, rotary
from zoo.transformer.rotary import RopeScaling

KEY = jax.random.key(0)


# An independent forward pass


def numpy_forward(model: Any, tokens: np.ndarray) -> np.ndarray:
    """One row of a causal RMSNorm, rotary, grouped-query, SwiGLU transformer, head by head."""
    w = {path: np.asarray(x, np.float64) for path, x in arrays(model).items()}
    config, length = model.config, len(tokens)
    size, groups = config.head_size, config.num_heads // config.kv_heads

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.residual.norm_eps) * scale

    def turn(x: np.ndarray) -> np.ndarray:
        pairs = round(size * config.positions.rotary_fraction) // 2
        angles = np.arange(length)[:, None] * config.positions.theta ** (-np.arange(pairs) / pairs)
        z = (x[:, :pairs] + 1j * x[:, pairs : 2 * pairs]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag, x[:, 2 * pairs :]], -1)

    residual = config.residual
    x = w["embedding.weight"][tokens] * residual.embedding_multiplier
    for layer in range(config.num_layers):
        b = {k.removeprefix("blocks."): v[layer] for k, v in w.items() if k.startswith("blocks.")}
        normed, added = norm(x, b["attention_norm.scale"]), np.zeros_like(x)
        for head in range(config.num_heads):
            q = turn(normed @ b["attention.wq"][:, head])
            k = turn(normed @ b["attention.wk"][:, head // groups])
            scores = q @ k.T / np.sqrt(size)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed = weights @ (normed @ b["attention.wv"][:, head // groups])
            if config.attention.output_gate:
                mixed /= 1 + np.exp(-normed @ b["attention.wg"][:, head])
            added += mixed @ b["attention.wo"][head]
        x = x + residual.multiplier * added
        normed = norm(x, b["mlp_norm.scale"])
        gate = normed @ b["mlp.w_gate"]
        hidden = gate / (1 + np.exp(-gate)) * (normed @ b["mlp.w_up"])
        x = x + residual.multiplier * (hidden @ b["mlp.w_down"])
    return norm(x, w["final_norm.scale"]) @ w["head.weight"] * config.logit_multiplier


MULTIPLIERS = {"residual.embedding_multiplier": 12.0, "residual.multiplier": 0.25}
MULTIPLIERS["logit_multiplier"] = 0.125


@pytest.mark.parametrize(
    "changes",
    [{}, {"positions.rotary_fraction": 2 / 3, "attention.output_gate": True, **MULTIPLIERS}],
)
def test_logits_match_independent_numpy_forward(changes: dict):
    # Dropout needs a key, and so is off.
    options = {"residual.norm_eps": 0.1, "positions.theta": 100.0, "dropout": 0.5}
    model = drawn_transformer(
        num_heads=4, **options, **{"attention.num_kv_heads": 2, "attention.head_dim": 6}, **changes
    )
    tokens = token_batch(2, 16)["tokens"]
    got = eqx.filter_jit(model)(jnp.asarray(tokens))
    assert got.dtype == jnp.float32
    for row in range(2):
        want = numpy_forward(model, tokens[row])
        np.testing.assert_allclose(got[row], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


# What a position sees


def influence(options: dict, **inputs: Any) -> np.ndarray:
    """How far the logits at t depend on the token at s: float[t, s], of twelve unlike tokens."""
    model = drawn_transformer(**options)
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    direction = jax.random.normal(KEY, (VOCAB,))

    def outputs(table: Array) -> Array:
        moved = eqx.tree_at(lambda m: m.embedding.weight, model, table)
        return (moved(tokens, **inputs)[0] * direction[None]).sum(-1)

    jacobian = jax.jit(jax.jacrev(outputs))(model.embedding.weight)
    return np.abs(jacobian).max(-1)[:, :12]


T, S = np.mgrid[:12, :12]
LOCAL_BUT_LAST: dict[str, Any] = {"attention.window_pattern": ("local", "local", "local", "global")}
SEGMENTS = np.array([1] * 5 + [2] * 4 + [0] * 3)
SAME = SEGMENTS[T] == SEGMENTS[S]


@pytest.mark.parametrize(
    ("options", "packed", "seen"),
    [
        ({}, False, S <= T),
        ({"causal": False}, False, S >= 0),
        # Each layer sees three positions further.
        ({"num_layers": 2, "attention.window": 4}, False, (S <= T) & (T - S < 7)),
        ({"num_layers": 1, "attention.window": 4, "causal": False}, False, abs(T - S) < 4),
        # The first three layers have a window.
        ({"num_layers": 3, "attention.window": 2, **LOCAL_BUT_LAST}, False, (S <= T) & (T - S < 4)),
        ({}, True, (S <= T) & SAME),
        ({"causal": False}, True, SAME),
    ],
)
def test_logits_depend_on_visible_tokens(options: dict, packed: bool, seen: np.ndarray):
    inputs = {"segment_ids": jnp.asarray(SEGMENTS, jnp.int32)[None]} if packed else {}
    found = influence(options, **inputs)
    assert (found[~seen] == 0).all()
    assert (found[seen] > 1e-7).all()


def test_the_mask_hides_padding():
    model = drawn_transformer(causal=False)
    call = eqx.filter_jit(lambda tokens, mask: model(tokens, mask=mask))
    mask = jnp.arange(8)[None] < 5
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    other = tokens.at[0, 6].set(40)
    np.testing.assert_array_equal(call(tokens, mask)[:, :5], call(other, mask)[:, :5])
    assert (call(tokens, mask | True)[:, :5] != call(other, mask | True)[:, :5]).any()


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_given_positions_are_used(positions: Any):
    model = drawn_transformer(**{"positions.kind": positions})
    tokens = jnp.tile(jnp.arange(6, dtype=jnp.int32), 2)[None]
    segment_ids = jnp.repeat(jnp.array([1, 2], jnp.int32), 6)[None]
    restarted = jnp.tile(jnp.arange(6, dtype=jnp.int32), 2)[None]
    call = eqx.filter_jit(model)
    packed = call(tokens, segment_ids=segment_ids, positions=restarted)
    np.testing.assert_allclose(packed[:, 6:], packed[:, :6], atol=1e-5)
    running = call(tokens, segment_ids=segment_ids)
    # Rotary positions tell distances alone.
    assert np.allclose(running[:, 6:], packed[:, 6:], atol=1e-4) == (positions == "rotary")
    assert np.allclose(running[:, :6], packed[:, :6], atol=1e-5)


# Options

LOCAL = {"attention.window": 5, "attention.window_pattern": ("local", "global"), "num_layers": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {
        **{"attention.num_kv_heads": 2, "attention.head_dim": 6, "tie_embeddings": True},
        **{"attention.qk_norm": "per_head"},
    },
    "biased": {
        **{"bias": True, "residual.norm": "layer", "mlp": "gelu", "attention.window": 5},
        "scan_layers": False,
    },
    "learned": {
        **{"positions.kind": "learned", "max_seq_len": 12, "mlp": "geglu"},
        **{"attention.soft_cap": 5.0, "logit_soft_cap": 3.0, "d_ff": None},
        "attention.head_dim": None,
    },
    "encoder": {
        **{"causal": False, "bias": True, "attention.kernel": "xla"},
        "residual.norm_placement": "stream",
    },
    "both norms": {
        **{"residual.norm_placement": "both", "residual.norm": "rms_offset", **LOCAL},
        **{"residual.scale_embedding": True, "attention.scale": 0.3},
        **{"positions.local_theta": 100.0, "positions.scaling": RopeScaling(8.0)},
    },
    "post norms": {
        **{"residual.norm_placement": "post", "attention.qk_norm": "across_heads"},
        **{"attention.qkv_bias": True, "mlp": "gelu_erf"},
        "positions.scaling": RopeScaling(8.0, 1.0, 4.0, 16),
    },
    "long rows": {
        "attention.head_dim": 4,
        "positions.scaling": RopeScaling(
            short_factors=(1.0, 2.0), long_factors=(3.0, 9.0), original_max_seq_len=8
        ),
        "mlp": "xielu",
    },
    "no positions, parallel": {
        **{**LOCAL, "attention.clip": 2.0, "positions.pattern": ("rotary", "none")},
        **{"residual.norm": "layer_offset", "residual.norm_bias": True, "head_bias": True},
        **{"residual.parallel": "two_norms", "mlp": "relu2", "mlp_bias": True},
    },
    "plain norms": {
        **{"attention.out_bias": True, "residual.norm": "layer_plain"},
        "residual.parallel": "one_norm",
    },
    "experts": {"experts.num_experts": 4, "experts.per_token": 2, "d_ff": 12},
    "masked encoder": {
        **{"causal": False, "mlp": "geglu_erf", "num_layers": 3, "head_bias": True},
        **{"tie_embeddings": True, "residual.norm": "layer", "residual.norm_bias": True},
        **{"encoder.embedding_norm": True, "encoder.first_norm": False, "encoder.mask_id": 3},
        "encoder.head": "transformed",
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_learns(name: str):
    model = drawn_transformer(**OPTIONS[name])
    batch = jax.tree.map(jnp.asarray, token_batch(4, 12))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda params: losses.next_token(eqx.combine(params, static), batch, None)[0]
    grads = arrays(jax.jit(jax.grad(loss))(params))
    assert grads.keys() == arrays(model).keys()
    for path, grad in grads.items():
        assert np.isfinite(grad).all(), path
        layers = np.abs(grad if path.startswith("blocks.") else grad[None])
        if path.endswith(("activation.slope", "activation.bound")):  # as they are stored
            assert not layers.any(), path
            continue
        assert (layers.reshape(len(layers), -1).max(1) > 1e-4).all(), path


@pytest.mark.parametrize("name", OPTIONS)
def test_flops_count_weights_and_attention(name: str):
    config = small_config(**OPTIONS[name])
    shapes = {path: x.shape for path, x in arrays(drawn_transformer(**OPTIONS[name])).items()}
    products = ("wq", "wk", "wv", "wo", "router", "w_gate", "w_up", "w_down")
    weights = [
        # A token goes to two of the four experts.
        shape
        if name != "experts" or len(shape) < 4 or "mlp" not in path
        else (2, shape[0], *shape[2:])
        for path, shape in shapes.items()
        if path.rpartition(".")[2] in products
        or path == "transform.dense.weight"
        or path == ("embedding.weight" if config.tie_embeddings else "head.weight")
    ]
    # A window of five; or all twelve keys, of which a causal query sees half; and two layers.
    keys = {"biased": 2 * 5, "encoder": 2 * 12, "masked encoder": 3 * 12} | dict.fromkeys(
        ("both norms", "no positions, parallel"), 5 + 6 + 5
    )
    keys = keys.get(name, 2 * 6)
    attention = 12 * config.num_heads * config.head_size * keys
    expected = 6 * sum(map(math.prod, weights)) + attention
    assert transformer.num_flops_per_token(config, 12) == expected


def test_initial_loss_is_log_vocabulary():
    model = eqx.filter_jit(make_transformer())(KEY)
    batch = jax.tree.map(jnp.asarray, token_batch())
    total, weight, _ = eqx.filter_jit(losses.next_token)(model, batch, None)
    # The logits have a variance of one, which costs half a nat.
    assert float(total / weight) == pytest.approx(np.log(VOCAB) + 0.5, abs=0.25)


def test_omitted_sizes_have_defaults():
    config = transformer.Config(vocab_size=8, d_model=48, num_heads=4)
    assert (config.head_size, config.kv_heads, config.hidden_size) == (12, 4, 128)
    assert transformer.Config(vocab_size=8, d_model=48, num_heads=4, mlp="gelu").hidden_size == 192


def test_an_activation_with_learned_factors_begins_as_in_its_paper():
    made = blocks.XIELU()
    factors = [np.log1p(np.exp(x)) for x in (made.positive, made.negative)]
    np.testing.assert_allclose(factors, [0.8, 0.8 - 0.5], rtol=1e-6)
    assert (made.slope, made.bound) == (0.5, np.float32(-1e-6))
    low = jax.eval_shape(cast(made, jnp.bfloat16), jnp.ones(3, jnp.bfloat16))
    assert low.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (
            {
                **{"attention.output_gate": True, "positions.kind": "learned"},
                **{"encoder.num_token_types": 16, "encoder.pooler": True},
                "encoder.head": "transformed",
            },
            2 * 8 + 6,
        ),
        (
            {
                **{"experts.num_experts": 4, "experts.num_shared": 1, "experts.shared_gate": True},
                "attention.sinks": True,
            },
            2 * 12 + 2,
        ),
    ],
    ids=["dense", "experts"],
)
def test_matrices_are_drawn_apart_and_biases_begin_at_zero(options: dict, count: int):
    """In each of two layers, and with the spread of their inputs; norms begin at one."""
    make = make_transformer(bias=True, head_bias=True, **options)
    inputs = {"wo": 2 * 2 * 32, "w_down": 2 * 2 * 64}  # divided by the parts of both layers
    ratios = []
    for path, x in arrays(eqx.filter_jit(make)(KEY)).items():
        name = path.rpartition(".")[2]
        if name.startswith("b") or name in ("scale", "sinks"):
            assert (np.asarray(x) == (name == "scale")).all(), path
            continue
        wanted = 0.02 if "embedding" in path else inputs.get(name, 32) ** -0.5
        assert np.std(x) == pytest.approx(wanted, rel=0.15), path
        for part in x if path.startswith("blocks.") else [x]:
            first, second = np.ravel(part)[:2]
            ratios.append(round(float(first / second), 4))  # alike of one key, whatever the size
    assert len(set(ratios)) == len(ratios) == count


def test_dropout_depends_on_the_key():
    model = drawn_transformer(dropout=0.3)
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    call = eqx.filter_jit(lambda key: model(tokens, key=key))
    plain, first, again, other = map(call, (None, *map(jax.random.key, (1, 1, 2))))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9
    assert (first != plain).mean() > 0.9


def test_the_logit_cap_bounds_the_logits():
    x = jax.random.normal(KEY, (1, 3, 32))
    free, capped = (drawn_transformer(logit_soft_cap=cap).readout()(x) for cap in (None, 0.5))
    assert np.abs(free).max() > 1
    np.testing.assert_allclose(capped, 0.5 * np.tanh(np.asarray(free) / 0.5), atol=1e-5)


# Errors


def test_call_options_are_checked():
    call, tokens = drawn_transformer(), jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(TypeError, match="token_mask"):
        call(tokens, token_mask=tokens > 0)
    with pytest.raises(TypeCheckError, match="mask"):
        call(tokens, mask=tokens[:, :3] > 0)
    with pytest.raises(ValueError, match=r"encoder\.pooler=False: this model has none"):
        call.pooled(jnp.zeros((2, 4, 32)))


def test_invalid_configurations_name_the_field():
    for options, message in (
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_heads": 5, "attention.head_dim": None}, "num_heads=5 does not divide d_model=32"),
        ({"attention.num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=8"),
        ({"attention.head_dim": 5}, "attention.head_dim=5 .*no even number"),
        ({"positions.rotary_fraction": 0.3}, r"positions\.rotary_fraction=0\.3 is no even"),
        ({"logit_multiplier": 0.0}, r"logit_multiplier=0\.0"),
        ({"residual.multiplier": -1.0}, r"residual\.multiplier=-1\.0"),
        ({"positions.rotary_fraction": 0.0}, r"positions\.rotary_fraction=0\.0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"attention.window": 0}, "attention.window=0"),
        ({"attention.clip": 0.0}, "attention.clip=0.0"),
        ({"positions.pattern": ()}, r"positions.pattern=\(\)"),
        (
            {"positions.kind": "learned", "positions.theta": 1e6},
            r"positions\.theta=1000000\.0: is of",
        ),
        (
            {"positions.kind": "none", "positions.pattern": ("none",)},
            r"positions\.pattern=\('none'",
        ),
        ({"positions.kind": "learned", "positions.local_theta": 1e4}, r"positions\.local_theta=1"),
        ({"positions.kind": "none", "positions.rotary_fraction": 0.5}, r"rotary_fraction=0\.5: is"),
        (
            {"positions.kind": "learned", "positions.scaling": RopeScaling(2.0)},
            r"positions\.scaling=.*kind='learned'; leave it out",
        ),
        ({"encoder.mask_id": 3}, r"encoder\.mask_id=3: .* causal=False"),
        ({"encoder.position_offset": 2}, r"encoder\.position_offset=2: .*kind='rotary'"),
        ({"encoder.head": "none", "tie_embeddings": True}, "encoder.head=.none.: has neither"),
        ({"encoder.first_norm": False, "residual.norm_placement": "post"}, "encoder.first_norm"),
        (
            {"residual.parallel": "one_norm", "residual.norm_placement": "both"},
            "residual.parallel='one_norm'",
        ),
        ({"attention.window_pattern": ()}, r"attention.window_pattern=\(\)"),
        ({"experts.num_experts": 2, "mlp": "gelu"}, "experts.num_experts=2: experts"),
    ):
        with pytest.raises(ValueError, match=message):
            small_config(**options)


def test_invalid_rope_scaling_names_the_field():
    with pytest.raises(ValueError, match=r"positions\.scaling has low_freq_factor: give all"):
        RopeScaling(8.0, low_freq_factor=1.0)
    with pytest.raises(ValueError, match=r"positions\.scaling\.high_freq_factor=0\.0"):
        RopeScaling(8.0, high_freq_factor=0.0)
    with pytest.raises(ValueError, match=r"positions\.scaling\.ramp='yarn': needs low"):
        RopeScaling(8.0, ramp="yarn")
    with pytest.raises(ValueError, match=r"short_factors=\(2\.0,\) and factor=8\.0"):
        RopeScaling(8.0, short_factors=(2.0,), long_factors=(3.0,), original_max_seq_len=4)
    with pytest.raises(ValueError, match=r"long_factors=\(\):"):
        RopeScaling(short_factors=(2.0,), original_max_seq_len=4)
    scaling = RopeScaling(short_factors=(2.0,), long_factors=(3.0,), original_max_seq_len=4)
    with pytest.raises(ValueError, match=r"short_factors has 1 .* 4 pairs"):
        small_config(**{"positions.scaling": scaling, "attention.head_dim": 8})


def test_sequences_beyond_learned_positions_are_refused():
    model = drawn_transformer(max_seq_len=8, **{"positions.kind": "learned"})
    with pytest.raises(ValueError, match="a sequence of 9 is longer than max_seq_len=8"):
        model(jnp.zeros((1, 9), jnp.int32))


# Rotary positions


POSITION = jnp.zeros((1, 1), jnp.int32)


@jax.jit
def rotate(x: Array, positions: Any) -> Array:
    positions = jnp.broadcast_to(jnp.asarray(positions), x.shape[:2])
    return rotary.rotate(x, rotary.rotary_tables(positions, x.shape[-1], 100.0))


def test_rotary_embedding_matches_complex_rotation():
    x = np.asarray(jax.random.normal(KEY, (2, 6, 3, 8)), np.float64)
    positions = np.array([[0, 1, 2, 0, 1, 7], [3, 1, 4, 1, 5, 900]])
    frequencies = 100.0 ** (-np.arange(4) / 4)
    turn = np.exp(1j * positions[:, :, None, None] * frequencies)
    z = (x[..., :4] + 1j * x[..., 4:]) * turn
    expected = np.concatenate([z.real, z.imag], -1)
    np.testing.assert_allclose(rotate(jnp.asarray(x, jnp.float32), positions), expected, atol=5e-4)


def test_waves_are_stretched_by_how_often_they_fit():
    """Llama 3's formula: two of these stay, three are stretched in part, and three in full."""
    frequency = 100.0 ** (-np.arange(8) / 8)
    fits = 64 * frequency / (2 * np.pi)
    share = (fits - 1) / 3
    between = (1 - share) * frequency / 8 + share * frequency
    want = np.where(fits > 4, frequency, np.where(fits < 1, frequency / 8, between))
    assert [(want == x).sum() for x in (frequency, between, frequency / 8)] == [2, 3, 3]
    scaling = RopeScaling(8.0, 1.0, 4.0, 64)
    got = scaling.stretch(jnp.asarray(frequency, jnp.float32), 100.0, POSITION)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("theta", "high", "truncate"), [(10_000.0, 32, True), (10_000.0, 32, False), (10.0, 128, True)]
)
def test_yarn_stretches_waves_by_their_number(theta: float, high: int, truncate: bool):
    """From the one that fits so often, which stays, to the one that fits once, or to twice all."""
    frequency = theta ** (-np.arange(16) / 16)
    ends = [16 * np.log(4096 / (2 * np.pi * fits)) / np.log(theta) for fits in (high, 1)]
    ends = [np.floor(ends[0]), min(np.ceil(ends[1]), 31)] if truncate else ends
    kept = np.interp(np.arange(16), ends, [1, 0])
    assert ((kept > 0) & (kept < 1)).sum() >= 4
    scaling = RopeScaling(8.0, 1.0, float(high), 4096, ramp="yarn", truncate=truncate)
    found = scaling.stretch(jnp.asarray(frequency, jnp.float32), theta, POSITION)
    np.testing.assert_allclose(found, frequency * (kept + (1 - kept) / 8), rtol=1e-5)


def test_rotary_positions_keep_the_compute_dtype():
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    # In bf16 the positions 1000 and 1001 would be the same.
    y = np.asarray(rotate(x, [[1000, 1001]]).astype(jnp.float32))
    assert rotate(x, [[0, 1]]).dtype == jnp.bfloat16
    grown = rotary.Rotary(*(jnp.ones((1, 2, 8)),) * 2, growth=jnp.ones((1, 2)))
    assert jax.eval_shape(rotary.rotate_queries, x, grown).dtype == jnp.bfloat16
    assert np.abs(y[0, 0] - y[0, 1]).max() > 0.1
