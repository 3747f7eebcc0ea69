"""zoo.nn.attention against softmax attention as the textbook has it, forward and backward."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, value_and_gradients
from jaxtyping import Array

from zoo.nn.attention import attend_to_slots, attention, masks


def inputs(length: int, heads: int = 2, kv_heads: int = 2, dtype: Any = jnp.float32) -> Any:
    keys = jax.random.split(jax.random.key(length), 4)
    shapes = [(2, length, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [1.5 * jax.random.normal(*pair).astype(dtype) for pair in zip(keys, shapes, strict=True)]


def segments(length: int) -> Array:
    """Two documents and padding in one row, one document in the other."""
    index = np.arange(length)
    packed = np.where(index < length // 3, 1, np.where(index < length - 3, 2, 0))
    return jnp.asarray(np.stack([packed, np.ones(length)]), jnp.int32)


def visible(length: int, causal: bool, window: int | None, segment_ids: Any) -> np.ndarray:
    """Which keys a query sees, bool[batch, 1, queries, keys], position by position."""
    seen = np.ones((2, 1, length, length), bool)
    for row in range(2):
        for q in range(length):
            for k in range(length):
                same = segment_ids is None or segment_ids[row, q] == segment_ids[row, k]
                near = window is None or abs(q - k) < window
                seen[row, 0, q, k] = same and near and (k <= q or not causal)
    return seen


def textbook(q: Any, k: Any, v: Any, seen: np.ndarray, soft_cap: float | None, np: Any) -> Any:
    """Softmax attention with the whole matrix; `np` is numpy, or jax.numpy for its gradient."""
    groups = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    logits = np.einsum("bqnh,bknh->bnqk", q, k) / q.shape[-1] ** 0.5
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    exponentials = np.where(seen, np.exp(logits - logits.max(-1, keepdims=True)), 0.0)
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    return np.einsum("bnqk,bknh->bqnh", weights, v)


CASES: dict[str, dict[str, Any]] = {
    "one": {"length": 1},
    "two": {"length": 2, "causal": False},
    "under a chunk": {"length": 15, "segments": True},
    "over a chunk": {"length": 17, "kv_heads": 1},
    "encoder": {"length": 33, "causal": False, "segments": True, "heads": 4, "xla": True},
    "window": {"length": 33, "window": 5, "segments": True, "xla": True},
    "window of one": {"length": 18, "window": 1},
    "wide window": {"length": 33, "window": 23},
    "encoder's window": {"length": 33, "window": 9, "causal": False, "xla": True},
    "soft cap": {"length": 20, "soft_cap": 1.5, "segments": True, "kv_heads": 1},
    "all": {"length": 33, "soft_cap": 2.0, "window": 20, "causal": False, "segments": True},
}


@pytest.mark.parametrize("name", CASES)
def test_chunked_attention_matches_textbook_formula(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks, "CHUNK", 16)
    case = {"causal": True, "window": None, "segments": False, "soft_cap": None, **CASES[name]}
    length, soft_cap = case["length"], case["soft_cap"]
    *qkv, g = inputs(length, case.get("heads", 2), case.get("kv_heads", 2))
    segment_ids = segments(length) if case["segments"] else None
    seen = visible(length, case["causal"], case["window"], segment_ids)
    options = {k: case[k] for k in ("causal", "window")} | {"segment_ids": segment_ids}

    def run(implementation: Any, soft_cap: Any = None) -> tuple:
        call = lambda q, k, v: attention(
            q, k, v, **options, soft_cap=soft_cap, implementation=implementation
        )
        return value_and_gradients(call, g, *qkv)

    got = run("chunked", soft_cap)
    exact = textbook(*(np.asarray(x, np.float64) for x in qkv), seen, soft_cap, np)
    np.testing.assert_allclose(got[0], exact, atol=2e-6)
    plain = lambda q, k, v: textbook(q, k, v, seen, soft_cap, jnp)
    for x, want in zip(got, value_and_gradients(plain, g, *qkv), strict=True):
        np.testing.assert_allclose(x, want, atol=2e-5)
    if case.get("xla"):
        for x, want in zip(got, run("xla"), strict=True):
            np.testing.assert_allclose(x, want, atol=2e-5)


@pytest.mark.parametrize("length", [1, 63, 65, 130, 1100])
def test_chunks_cover_queries_and_visible_keys(length: int):
    for causal in (True, False):
        for window in (None, 1, 7, 64, 200):
            mask = masks.Mask(causal, window)
            chunks = list(masks.chunks(length, length, mask))
            queries = [q for chunk in chunks for q in range(chunk.start, chunk.stop)]
            assert queries == list(range(length))
            for chunk in chunks:
                reach = length if window is None else window - 1
                first = max(0, chunk.start - reach)
                last = min(length, chunk.stop + (0 if causal else reach))
                assert (chunk.first_key, chunk.last_key) == (first, last)
            if length == 1100 and (causal or window):
                # Nor are those that it does not see multiplied for nothing.
                products = sum((c.stop - c.start) * (c.last_key - c.first_key) for c in chunks)
                assert products <= 0.8 * length**2


def test_default_chunk_size_matches_xla():
    *qkv, g = inputs(130, heads=2, kv_heads=1)
    run = lambda implementation: value_and_gradients(
        lambda q, k, v: attention(q, k, v, causal=True, implementation=implementation), g, *qkv
    )
    for x, want in zip(run("chunked"), run("xla"), strict=True):
        np.testing.assert_allclose(x, want, atol=2e-5)


def test_bf16_attention_is_accurate_to_rounding():
    exact_inputs = inputs(40, kv_heads=1)
    rounded = [x.astype(jnp.bfloat16) for x in exact_inputs]
    run = lambda q, k, v, g: value_and_gradients(
        lambda q, k, v: attention(q, k, v, causal=True, implementation="chunked"), g, q, k, v
    )
    got = run(*rounded)
    assert {x.dtype for x in got} == {jnp.dtype("bfloat16")}
    for x, want in zip(got, run(*(x.astype(jnp.float32) for x in rounded)), strict=True):
        scale = np.abs(want).max()
        np.testing.assert_allclose(x.astype(jnp.float32), want, atol=0.02 * scale)


def test_the_scale_may_be_given():
    q, k, v = np.random.default_rng(0).normal(size=(3, 3, 5, 2, 8)).astype(np.float32)
    got = attention(*map(jnp.asarray, (q, k, v)), causal=True, scale=0.5)
    seen = visible(5, True, None, None)[:1]
    np.testing.assert_allclose(got, textbook(q * 0.5 * 8**0.5, k, v, seen, None, np), atol=4e-6)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, jnp.float32),
        ({"soft_cap": 1.5}, jnp.float32),
        ({"soft_cap": 2.0, "scale": 0.3}, jnp.float32),
        ({}, jnp.bfloat16),
    ],
    ids=str,
)
def test_cached_attention_matches_textbook_formula(options: dict, dtype: Any, heads: int):
    rng = np.random.default_rng(0)
    shapes = [(3, 1, heads, 8), (3, 2, 6, 8), (3, 2, 6, 8)]
    q, k, v = (jnp.asarray(2 * rng.normal(size=shape), dtype) for shape in shapes)
    seen = rng.random((3, 6)) < 0.5
    seen[:, 0] = True
    run = lambda q, k, v: attend_to_slots(q, k, v, jnp.asarray(seen)[:, None], **options)
    got = run(q, k, v)
    assert got.dtype == dtype
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k.swapaxes(1, 2), v.swapaxes(1, 2)))
    q64 *= options.get("scale", 8**-0.5) * 8**0.5
    want = textbook(q64, k64, v64, seen[:, None, None], options.get("soft_cap"), np)
    tolerance = 4e-6 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=tolerance * np.abs(want).max())
    # One query per head is two in bf16, for which XLA for CPU does not convert the keys.
    products = [
        e.invars[0].aval.shape[-2:]
        for e in equations(jax.make_jaxpr(run)(q, k, v))
        if e.primitive.name == "dot_general"
    ]
    queries = 2 if dtype == jnp.bfloat16 else heads // 2
    assert products == [(queries, 8), (queries, 6)]


@pytest.mark.parametrize("implementation", ["chunked", "xla"])
def test_a_row_of_padding_gives_no_nan(implementation: Any):
    *qkv, g = inputs(6)
    segment_ids = jnp.zeros((2, 6), jnp.int32)
    call = lambda q, k, v: attention(
        q, k, v, causal=True, window=2, segment_ids=segment_ids, implementation=implementation
    )
    for x in value_and_gradients(call, g, *qkv):
        assert np.isfinite(x).all()


def test_large_logits_do_not_overflow():
    *qkv, g = inputs(6)
    call = lambda q, k, v: attention(1e4 * q, k, v, causal=True, implementation="chunked")
    for x in value_and_gradients(call, g, *qkv):
        assert np.isfinite(x).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "cudnn"}, "attention='cudnn' needs an NVIDIA GPU.*'cpu'.*'auto'"),
        ({"implementation": "cudnn", "soft_cap": 5.0}, "no soft cap.*attention_soft_cap=5.0"),
        ({"implementation": "xla", "soft_cap": 5.0}, "attention='xla' has no soft cap"),
    ],
)
def test_inapplicable_attention_backends_are_refused(options: dict, message: str):
    q, k, v, _ = inputs(4)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, causal=True, **options)


CUDNN = {"dtype": jnp.bfloat16, "head_dim": 64, "length": 6, "causal": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": jnp.float32}, "bf16 or fp16.*float32"),
        ({"head_dim": 36}, "multiple of 8.*head_dim=36"),
        ({"head_dim": 256}, "up to 128.*head_dim=256"),
        ({"causal": False, "window": 3}, "causal attention for a window, and window=3"),
        ({"packed": True}, "a mask of .seq, seq. for packed rows"),
        ({"window": 3, "packed": True}, "a mask of .seq, seq. for packed rows"),
        ({}, None),
        ({"causal": False, "length": 5}, None),
        ({"window": 3}, None),
    ],
    ids=str,
)
def test_auto_uses_cudnn_where_supported(
    changes: dict, message: str | None, monkeypatch: pytest.MonkeyPatch
):
    case = {"window": None, "packed": False, **CUDNN, **changes}
    q = 0.1 * jnp.arange(case["length"] * case["head_dim"], dtype=case["dtype"])
    q = q.reshape(1, case["length"], 1, case["head_dim"])
    options = {"causal": case["causal"], "window": case["window"]}
    options["segment_ids"] = jnp.ones((1, case["length"]), jnp.int32) if case["packed"] else None
    chunked, taken = attention(q, q, q, **options, implementation="chunked"), []

    def kernel(q: Any, *_: Any, implementation: str, **__: Any) -> Any:
        taken.append(implementation)
        return q

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    got = attention(q, q, q, **options)
    if message is None:
        assert taken == ["cudnn"]
    else:
        assert taken == []
        np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (got, chunked)), rtol=0.02)
        with pytest.raises(ValueError, match=message):
            attention(q, q, q, **options, implementation="cudnn")
