"""zoo.nn.attention against softmax attention as the textbook has it, forward and backward."""

import contextlib
import functools
import itertools
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import covering, equations, flash, value_and_gradients
from jaxtyping import Array

from zoo import sharding
from zoo.nn.attention import attention, masks, splash, triton
from zoo.nn.attention.attention import attend_to_slots, overridden_kernel
from zoo.nn.attention.masks import Mask
from zoo.nn.attention.masks import run as run_kernel
from zoo.nn.attention.splash import Blocks, blocks_for
from zoo.nn.attention.triton import Tiling, Triton


def inputs(length: int, heads: int = 2, kv_heads: int = 2, dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(length)
    shapes = [(2, length, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(1.5 * rng.normal(size=shape), dtype) for shape in shapes]


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


def textbook(
    q: Any, k: Any, v: Any, seen: np.ndarray, soft_cap: float | None, np: Any, *sinks: Any
) -> Any:
    """Softmax attention with the whole matrix; `np` is numpy, or jax.numpy for its gradient."""
    groups = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    logits = np.einsum("bqnh,bknh->bnqk", q, k) / q.shape[-1] ** 0.5
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    top = logits.max(-1, keepdims=True)
    exponentials = np.where(seen, np.exp(logits - top), 0.0)
    total = exponentials.sum(-1, keepdims=True)
    for each in sinks:
        total = total + np.exp(each[None, :, None, None] - top)
    weights = exponentials / total
    return np.einsum("bnqk,bknh->bqnh", weights, v)


CASES: dict[str, dict[str, Any]] = {
    "one": {"length": 1},
    "under a chunk": {"length": 15, "segments": True},
    "over a chunk": {"length": 17, "kv_heads": 1, "triton": True},
    "encoder": {"length": 33, "causal": False, "segments": True, "heads": 4, "xla": True}
    | {"triton": True},
    "window": {"length": 33, "window": 5, "segments": True, "xla": True},
    "window of one": {"length": 18, "window": 1},
    "soft cap": {"length": 20, "soft_cap": 1.5, "segments": True, "kv_heads": 1},
    "sinks": {"length": 33, "window": 20, "segments": True, "heads": 4, "sinks": True}
    | {"triton": True},
    "all": {"length": 33, "soft_cap": 2.0, "window": 20, "causal": False, "segments": True}
    | {"triton": True},
}


@pytest.mark.parametrize("name", CASES)
def test_chunked_attention_matches_textbook_formula(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks, "CPU_CHUNK", 16)
    case = {"causal": True, "window": None, "segments": False, "soft_cap": None, **CASES[name]}
    length, soft_cap = case["length"], case["soft_cap"]
    *qkv, g = inputs(length, case.get("heads", 2), case.get("kv_heads", 2))
    segment_ids = segments(length) if case["segments"] else None
    seen = visible(length, case["causal"], case["window"], segment_ids)
    options = {k: case[k] for k in ("causal", "window")} | {"segment_ids": segment_ids}

    sinks = [jnp.linspace(-1.0, 2.5, case["heads"])] if case.get("sinks") else []

    def run(implementation: Any, soft_cap: Any = None) -> tuple:
        more = {"soft_cap": soft_cap, "implementation": implementation}
        call = lambda q, k, v, *sinks: attention(
            q, k, v, **options, **more, **dict(zip(["sinks"], sinks, strict=False))
        )
        return value_and_gradients(call, g, *qkv, *sinks)

    got = run("chunked", soft_cap)
    exact = textbook(*(np.asarray(x, np.float64) for x in qkv), seen, soft_cap, np, *sinks)
    np.testing.assert_allclose(got[0], exact, atol=2e-6)
    plain = lambda q, k, v, *sinks: textbook(q, k, v, seen, soft_cap, jnp, *sinks)
    found = [got, run("xla")] if case.get("xla") else [got]
    if case.get("triton"):
        kernel = Triton(Mask(case["causal"], case["window"]), 8**-0.5, soft_cap)
        kernel = kernel._replace(tiling=TILING, interpret=True)
        ids = None if segment_ids is None else (segment_ids, segment_ids)
        call = lambda q, k, v, *sinks: run_kernel(kernel, q, k, v, ids, *(sinks or [None]))
        found.append(value_and_gradients(call, g, *qkv, *sinks))
    for place, want in enumerate(value_and_gradients(plain, g, *qkv, *sinks)):
        for arrays in found:
            np.testing.assert_allclose(arrays[place], want, atol=2e-5)


TILING = Tiling(*(triton.Blocks(*sizes, 4, 2) for sizes in ((32, 16), (16, 32), (32, 16))))


@pytest.mark.parametrize("mask", [Mask(True, None), Mask(False, None), Mask(True, 8)], ids=str)
def test_triton_leaves_out_blocks_of_other_documents(mask: Mask):
    ids = np.repeat([1, 2, 3, 0], [32, 40, 24, 32])[None].repeat(2, 0)
    q, segment_ids = jnp.zeros((2, 128, 2, 16)), jnp.asarray(ids, jnp.int32)
    kernel = Triton(mask, 1.0, None, tiling=TILING)
    inputs = triton.Inputs.of(kernel, (q, q, q), (segment_ids, segment_ids))
    found = np.asarray(inputs.seen(triton.Blocks(16, 32, 4, 2)))
    wanted = visible(128, mask.causal, mask.window, ids)[:, 0]
    wanted = wanted.reshape(2, 8, 16, 4, 32).any((2, 4))
    if mask.window is None:
        np.testing.assert_array_equal(found, wanted)
    assert (found >= wanted).all()
    assert found.sum() <= 2 * 12
    first, end = np.moveaxis(np.asarray(triton.ranges(jnp.asarray(wanted))), -1, 0)
    np.testing.assert_array_equal(first, wanted.argmax(-1))
    np.testing.assert_array_equal(end - first, wanted.sum(-1))


def grown(length: int, causal: bool = True) -> tuple[int, int]:
    """The equations of a gradient's program, and the largest of its arrays."""
    q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    total = lambda *qkv: attention(*qkv, causal=causal, implementation="chunked").sum()
    found = [*equations(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, q, q))]
    return len(found), max(x.aval.size for e in found for x in e.outvars)


def test_a_long_row_grows_no_program():
    (few, small), (same, large) = grown(8_192), grown(32_768)
    assert few == same
    assert large <= 4 * small


@pytest.mark.parametrize(
    ("mask", "count"), [(Mask(True, None), 10), (Mask(False, None), 16), (Mask(True, 100), 7)]
)
def test_pairs_are_those_that_see_each_other(mask: Mask, count: int):
    length = 4 * 512 - 7
    pairs = [*masks.pairs(0, length, length, mask, 512, 512)]
    assert len(pairs) == len(set(pairs)) == count


def test_queries_beyond_the_last_key_see_them_all():
    sizes = 12, Mask(False, None), 13, 13
    assert [*masks.pairs(0, 50, *sizes)] == [(query, 0) for query in range(4)]


def splash_and_chunked(
    mask: Mask,
    soft_cap: Any,
    packed: bool,
    heads: tuple[int, int],
    length: int = 200,
    fused: bool = False,
) -> tuple[tuple, tuple]:
    """Outputs and gradients of the kernel, interpreted, and of the zoo's own."""
    *qkv, g = inputs(length, *heads)
    segment_ids = segments(length) if packed else None
    options = {"soft_cap": soft_cap, "scale": 0.3}
    blocks = {"blocks": Blocks(128, 128, 128), "interpret": True, "fused": fused}
    kernel = jax.jit(flash(mask, segment_ids, **options, **blocks))
    options |= {"causal": mask.causal, "window": mask.window, "segment_ids": segment_ids}
    own = jax.jit(functools.partial(attention, **options, implementation="chunked"))
    return value_and_gradients(kernel, g, *qkv), value_and_gradients(own, g, *qkv)


def assert_equal(got: tuple, wanted: tuple) -> None:
    for x, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
def test_splash_matches_chunked_attention_on_a_mesh():
    with sharding.use(sharding.make_mesh("fsdp=2,tensor=4")):
        assert_equal(*splash_and_chunked(Mask(True, 70), 2.0, True, (8, 4), fused=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("causal", "window", "soft_cap", "heads", "packed", "fused"),
    covering([True, False], [None, 70], [None, 2.0], [(2, 2), (4, 2)], *[[False, True]] * 2),
)
def test_splash_matches_chunked_attention(
    causal: bool, window: Any, soft_cap: Any, heads: tuple[int, int], packed: bool, fused: bool
):
    mask = Mask(causal, window)
    assert_equal(*splash_and_chunked(mask, soft_cap, packed, heads, fused=fused))


@pytest.mark.slow
def test_splash_takes_whole_kv_heads_beside_split_queries():
    rules = {**sharding.RULES, "kv_heads": None}
    with sharding.use(sharding.Layout("fsdp=2,tensor=4", rules)):
        assert_equal(*splash_and_chunked(Mask(True, None), None, True, (24, 8), 128))


@pytest.mark.parametrize("mask", [Mask(True, None), Mask(True, 300), Mask(False, 140)])
def test_blocks_of_lazy_masks_are_those_of_the_dense(mask: Mask):
    shape = splash.Shape(1024, 1024)
    lazy = splash._lazy(mask, shape, Blocks(128, 128, 128))
    dense = np.asarray(mask.seen(0, 0, (1024, 1024), None))[0, 0, 0]
    for rows, columns in itertools.product(range(0, 1024, 128), repeat=2):
        block = slice(rows, rows + 128), slice(columns, columns + 128)
        assert lazy[block].any() == dense[block].any()
        assert lazy[block].all() == dense[block].all()
    mask_sizes = {lazy[slice(0, 128), slice(k, k + 128)].size for k in range(0, 1024, 128)}
    assert mask_sizes == {1, 128 * 128}


def splash_gradient(length: int) -> Any:
    """The jaxpr of the kernel's gradient."""
    q = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.bfloat16)
    call = flash(Mask(True, None))
    total = lambda *qkv: call(*qkv).astype(jnp.float32).sum()
    return jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, q, q)


def test_tracing_a_long_row_keeps_no_square_on_the_host():
    tracemalloc.start()
    splash_gradient(16_384)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_384**2 / 8


def test_blocks_pad_an_eighth_at_most():
    for length in (128, 200, 640, 1_000, 4_224, 8_192, 100_000):
        blocks = blocks_for(length, length)
        assert -length % max(blocks.queries, blocks.keys) <= max(length // 8, 127)
        assert blocks.keys % blocks.keys_per_product == 0
    assert blocks_for(8_192, 8_192) == (512, 512, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "splash"),
        ({"length": 100}, "rows of 128 positions or more.*100"),
        ({"dtype": jnp.float16}, "bf16 or fp32.*float16"),
        ({"platform": "cpu"}, "a TPU, and this run is on 'cpu'"),
    ],
    ids=str,
)
def test_auto_uses_splash_where_supported(
    changes: dict, message: str, monkeypatch: pytest.MonkeyPatch
):
    case = {"length": 128, "dtype": jnp.bfloat16, "platform": "tpu", **changes}
    monkeypatch.setattr(jax, "default_backend", lambda: case["platform"])
    q, *_ = inputs(case["length"], dtype=case["dtype"])
    kernel = lambda self, q, *_: jnp.full_like(q, 8 if self.fused else 7)
    monkeypatch.setattr(splash.Splash, "__call__", kernel)
    attend = lambda **options: attention(
        q, q, q, causal=False, window=9, soft_cap=2.0, segment_ids=segments(len(q[0])), **options
    )
    assert (attend() == 7).all() == (message == "splash")
    ok = contextlib.nullcontext()
    with ok if message == "splash" else pytest.raises(ValueError, match=message):
        attend(implementation="splash")
        assert (attend(implementation="splash_fused") == 8).all()
        with overridden_kernel("chunked"):
            assert (attend() != 7).any()


@pytest.mark.parametrize(("rules", "taken"), [({}, "cudnn"), ({"kv_heads": None}, "triton")])
def test_cudnn_splits_keys_as_queries(
    rules: dict[str, None], taken: str, monkeypatch: pytest.MonkeyPatch
):
    found: list[str] = []
    monkeypatch.setattr(sys.modules[attention.__module__], "platform", lambda: "gpu")
    monkeypatch.setattr(Triton, "__call__", lambda _, q, *__: found.append("triton") or q)
    kernel = lambda q, *_, **options: found.append(options["implementation"]) or q
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    q, k, *_ = inputs(128, 4, 2, dtype=jnp.bfloat16)
    with sharding.use(sharding.Layout("fsdp=2,tensor=2", {**sharding.RULES, **rules})):
        jax.eval_shape(functools.partial(attention, causal=True), q, k, k)
    assert found == [taken]


@pytest.mark.parametrize(
    ("mesh", "taken"),
    [
        ("fsdp=2,tensor=2", [(1, 128, 1, 8)]),
        ("context=2", []),  # 64 positions are too few for it
    ],
)
def test_splash_takes_what_a_device_has(
    mesh: str, taken: list[Any], monkeypatch: pytest.MonkeyPatch
):
    shapes: list[Any] = []
    monkeypatch.setattr(sys.modules[attention.__module__], "platform", lambda: "tpu")
    kernel = lambda self, q, *_: shapes.append(q.shape) or q
    monkeypatch.setattr(splash.Splash, "__call__", kernel)
    q, *_ = inputs(128, dtype=jnp.bfloat16)
    with sharding.use(sharding.make_mesh(mesh)):
        jax.eval_shape(functools.partial(attention, causal=True), q, q, q)
    assert shapes == taken


def test_chunks_are_equal_parts_of_a_row(monkeypatch: pytest.MonkeyPatch):
    assert [masks.chunk_size(x) for x in (1, 128, 129, 8_192)] == [1, 128, 65, 128]
    monkeypatch.setattr(masks, "platform", lambda: "tpu")
    assert [masks.chunk_size(x) for x in (128, 512, 1_025)] == [128, 512, 342]


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
    products = [e for e in equations(jax.make_jaxpr(run)(*rounded)) if "dot" in e.primitive.name]
    assert {x.aval.dtype for e in products for x in e.invars} == {jnp.dtype("bfloat16")}


def test_the_scale_may_be_given():
    q, k, v = np.random.default_rng(0).normal(size=(3, 3, 5, 2, 8)).astype(np.float32)
    got = attention(*map(jnp.asarray, (q, k, v)), causal=True, scale=0.5)
    seen = visible(5, True, None, None)[:1]
    np.testing.assert_allclose(got, textbook(q * 0.5 * 8**0.5, k, v, seen, None, np), atol=4e-6)


@pytest.mark.parametrize(
    ("new", "heads", "options", "dtype"),
    [
        (1, 2, {}, jnp.float32),
        (1, 4, {"soft_cap": 2.0, "scale": 0.3}, jnp.float32),
        (3, 4, {"sinks": True}, jnp.float32),
        (1, 2, {}, jnp.bfloat16),
        (3, 4, {}, jnp.bfloat16),
    ],
    ids=str,
)
def test_cached_attention_matches_textbook_formula(new: int, heads: int, options: dict, dtype: Any):
    rng = np.random.default_rng(0)
    shapes = [(3, new, heads, 8), (3, 2, 6, 8), (3, 2, 6, 8)]
    q, k, v = (jnp.asarray(2 * rng.normal(size=shape), dtype) for shape in shapes)
    seen = rng.random((3, new, 6)) < 0.5
    seen[..., 0] = True
    sinks = [np.linspace(-1.0, 2.5, heads)] if "sinks" in options else []
    given = {**options, "sinks": jnp.asarray(sinks[0])} if sinks else options
    run = lambda q, k, v: attend_to_slots(q, k, v, jnp.asarray(seen), **given)
    got = jax.jit(run)(q, k, v)
    assert got.dtype == dtype
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k.swapaxes(1, 2), v.swapaxes(1, 2)))
    q64 *= options.get("scale", 8**-0.5) * 8**0.5
    want = textbook(q64, k64, v64, seen[:, None], options.get("soft_cap"), np, *sinks)
    tolerance = 4e-6 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=tolerance * np.abs(want).max())
    # One query per head is two in bf16, for which XLA for CPU does not convert the keys.
    products = [
        e.invars[0].aval.shape[-2:]
        for e in equations(jax.make_jaxpr(run)(q, k, v))
        if e.primitive.name == "dot_general"
    ]
    queries = max(new * heads // 2, 2 if dtype == jnp.bfloat16 else 1)
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


def test_inapplicable_attention_backends_are_refused():
    q, k, v, _ = inputs(4)
    for options, message in (
        ({"implementation": "cudnn"}, "kernel='cudnn' needs an NVIDIA GPU.*'cpu'.*'auto'"),
        ({"implementation": "cudnn", "soft_cap": 5.0}, "no soft cap.*attention.soft_cap=5.0"),
        ({"implementation": "xla", "soft_cap": 5.0}, "attention.kernel='xla' has no soft cap"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, causal=True, **options)


CUDNN = {"dtype": jnp.bfloat16, "head_dim": 64, "length": 6, "causal": True}


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"dtype": jnp.float32}, {"cudnn": "bf16 or fp16.*float32", "triton": "float32"}),
        ({"head_dim": 36}, {"cudnn": "multiple of 8.*dim=36", "triton": "multiple of 8.*dim=36"}),
        ({"head_dim": 264}, {"cudnn": "128.*head_dim=264", "triton": "256.*head_dim=264"}),
        ({"head_dim": 256}, {"cudnn": "up to 128.*head_dim=256"}),
        ({"causal": False, "window": 3}, {"cudnn": "causal attention for a window, and window=3"}),
        ({"packed": True}, {"cudnn": "no packed rows"}),
        ({"soft_cap": 2.0}, {"cudnn": "no soft cap"}),
        ({"capability": "7.5"}, {"cudnn": "8.0.*7.5", "triton": "8.0.*7.5"}),
        ({}, {}),
        ({"length": 5}, {"cudnn": "even number of positions.*5"}),
        ({"causal": False}, {}),
        ({"window": 3}, {}),
    ],
    ids=str,
)
def test_auto_uses_kernels_of_gpus_where_supported(
    changes: dict, messages: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    case = {"window": None, "packed": False, "soft_cap": None, **CUDNN, **changes}
    q = 0.1 * np.arange(case["length"] * case["head_dim"])
    q = jnp.asarray(q.reshape(1, case["length"], 1, case["head_dim"]), case["dtype"])
    options = {name: case[name] for name in ("causal", "window", "soft_cap")}
    options["segment_ids"] = jnp.ones((1, case["length"]), jnp.int32) if case["packed"] else None
    run = lambda q, **more: jax.jit(lambda q: attention(q, q, q, **options, **more))(q)
    chunked, taken = run(q, implementation="chunked"), []

    def kernel(q: Any, *_: Any, implementation: str, **__: Any) -> Any:
        taken.append(implementation)
        return q

    device = SimpleNamespace(compute_capability=case.get("capability", "9.0"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    monkeypatch.setattr(Triton, "__call__", lambda _, q, *__: taken.append("triton") or q)
    got = run(q)
    assert taken == [name for name in ("cudnn", "triton") if name not in messages][:1]
    if not taken:
        np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (got, chunked)), rtol=0.02)
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message):
            attention(q, q, q, **options, implementation=name)
