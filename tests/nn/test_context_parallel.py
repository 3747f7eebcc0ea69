"""The mesh axis "context": tokens of a row on several devices give the numbers of one device."""

import functools
import itertools
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bert_config, covering, flash, one_step, value_and_gradients

import zoo
from zoo import mlp, sharding
from zoo.common import configuration
from zoo.nn.attention import attention, masks
from zoo.nn.attention.chunked import Chunked
from zoo.nn.attention.context_parallel import Exchange
from zoo.nn.attention.masks import Mask
from zoo.nn.attention.splash import Blocks
from zoo.planning import collectives, hlo
from zoo.training import chunked_loss, losses
from zoo.wrappers import lora
from zoo.wrappers.classifier import Classifier
from zoo.wrappers.ensemble import Ensemble, member_loss

MESHES = ("context=8", "fsdp=4,context=2", "fsdp=2,context=2,tensor=2", "data=2,context=4")


def inputs(length: int, heads: tuple[int, int], size: int = 8) -> list[Any]:
    rng = np.random.default_rng(length)
    shapes = [(4, length, n, size) for n in (*heads, heads[1], heads[0])]
    return [jnp.asarray(1.5 * rng.normal(size=shape), jnp.float32) for shape in shapes]


def segments(length: int) -> Any:
    """Rows of documents of several lengths, the last of each row padding."""
    index = np.arange(length)
    ends = [[length // 5, length // 2, length - 3], [3, length - 9], [length], [length // 3]]
    return jnp.asarray(np.stack([(index[None] >= np.array(e)[:, None]).sum(0) for e in ends]) + 1)


def attend(options: dict[str, Any], packed: bool, sinks: bool, qkvg: list[Any]) -> tuple:
    """Outputs and gradients, of the sinks too."""
    *qkv, g = qkvg
    ids = segments(g.shape[1]).astype(jnp.int32) if packed else None
    given = [jnp.linspace(-1.0, 2.5, g.shape[2])] if sinks else []

    def call(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        more = dict(zip(["sinks"], sinks, strict=False))
        return attention(q, k, v, segment_ids=ids, **options, **more)

    return value_and_gradients(call, g, *qkv, *given)


def assert_equal(got: tuple, wanted: tuple, rtol: float = 2e-6) -> None:
    largest = max(np.abs(want).max() for want in wanted)  # a window of one leaves no gradient of q
    for x, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=rtol * largest)


def check_attention(
    monkeypatch: Any,
    mesh: str,
    packed: bool,
    heads: tuple[int, int],
    sinks: bool = False,
    **options: Any,
) -> None:
    """With several chunks in each piece of a row, the last of them padded, against one chunk."""
    qkvg = inputs(64, heads)
    wanted = attend(options, packed, sinks, qkvg)
    assert not sinks or np.abs(wanted[-1]).min() > 1e-2
    monkeypatch.setattr(masks, "CPU_CHUNK", 7)
    with sharding.use(sharding.make_mesh(mesh)):
        assert_equal(attend(options, packed, sinks, qkvg), wanted, 5e-6)


@pytest.mark.parametrize(
    ("mesh", "packed", "causal", "window", "sinks", "transfer"),
    [
        ("context=4,tensor=2", True, True, None, True, "ring"),  # in zigzag
        ("context=8", True, True, 12, True, "ring"),  # from the parts before
        ("data=2,context=4", False, False, None, False, "ring"),
        ("data=2,context=4", True, False, 60, False, "ring"),  # of all parts around
        ("data=2,context=4", True, True, 40, True, "exchange"),  # of key-value heads twice
        ("fsdp=2,tensor=2", True, True, None, True, "auto"),
    ],
)
def test_attention_over_split_rows_is_that_of_whole_ones(
    mesh: str,
    packed: bool,
    causal: bool,
    window: int | None,
    sinks: bool,
    transfer: str,
    monkeypatch: Any,
):
    options = {"causal": causal, "window": window, "sinks": sinks, "implementation": transfer}
    check_attention(monkeypatch, mesh, packed, (4, 2), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "packed", "causal", "window", "soft_cap", "heads", "transfer"),
    [
        *covering(
            MESHES,
            [False, True],
            [False, True],
            [None, 1, 9, 40],
            [None, 2.0],
            [(2, 2), (4, 2), (6, 2)],
            ["ring"],
        ),
        *covering(
            MESHES[::3],
            [False, True],
            [False, True],
            [None, 40],
            [None, 2.0],
            [(8, 8), (16, 4)],
            ["exchange"],
        ),
        # Heads of several devices begin within a group.
        *covering(["data=2,context=4"], [True], [True], [None, 40], [2.0], [(12, 6)], ["exchange"]),
    ],
)
def test_attention_over_split_rows(
    mesh: str,
    packed: bool,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    heads: tuple[int, int],
    transfer: str,
    monkeypatch: Any,
):
    options = {"causal": causal, "window": window, "soft_cap": soft_cap}
    check_attention(monkeypatch, mesh, packed, heads, **options, implementation=transfer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "causal", "window", "packed"),
    covering(
        [("context=2", "ring"), ("context=4,tensor=2", "ring"), ("context=2", "exchange")],
        [True, False],
        [None, 230],
        [True, False],
    ),
)
def test_splash_over_split_rows(
    sent: tuple[str, Any], causal: bool, window: int | None, packed: bool
):
    (mesh, transfer), mask = sent, Mask(causal, window)
    length = 300 if mesh == "context=2" else 400
    *qkv, g = inputs(length, (4, 2))
    ids = segments(length).astype(jnp.int32) if packed else None
    own = {"causal": mask.causal, "window": mask.window, "scale": 0.3}
    wanted = attend(own, packed, False, [*qkv, g])
    options = {"scale": 0.3, "blocks": Blocks(128, 128, 128), "interpret": True}
    with sharding.use(sharding.make_mesh(mesh)):
        kernel = jax.jit(flash(mask, ids, transfer, **options))
        assert_equal(value_and_gradients(kernel, g, *qkv), wanted, 1e-5)


@pytest.mark.parametrize(
    ("mesh", "heads"),
    [
        ("context=2,tensor=4", (8, 4)),  # a device's query heads are of a whole group,
        ("context=2,tensor=4", (8, 2)),  # of a half,
        ("context=2,tensor=2", (12, 3)),  # or end within one
    ],
)
def test_query_heads_on_several_devices_meet_their_key_value_heads(mesh: str, heads: Any):
    """Where all devices have all of those, each of which sees one key, whose value says which."""
    number = heads[1]
    place, head = np.ogrid[:8, :number]
    k = np.where(place == head, 100.0, 0.0)[None, ..., None] * np.ones(4)
    v = np.broadcast_to((10.0 * head + place)[None, ..., None], k.shape)
    q = np.ones((1, 8, heads[0], 4))
    rules = {**sharding.RULES, "kv_heads": None}
    with sharding.use(zoo.Layout(mesh, rules)):
        call = jax.jit(functools.partial(attention, causal=False, implementation="ring"))
        out = call(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))
    wanted = 11 * (np.arange(heads[0]) // (heads[0] // number))
    np.testing.assert_allclose(out, np.broadcast_to(wanted[:, None], out.shape), rtol=1e-6)


@pytest.mark.parametrize(
    ("causal", "window", "transfer", "kinds", "numbers"),
    [
        # Of 16 tokens a quarter stays: 8 heads of queries and outputs, 2 of keys and values twice.
        (True, None, "exchange", {"all-to-all"}, 2 * 2 * (8 + 2 * 2) * 16 * 3 / 4),
        # 2 heads of keys and values of all parts, 64 tokens, twice, and their gradients; and half
        # of 16 tokens of queries, keys, values and outputs, and of their gradients.
        (True, None, "ring", {"collective-permute"}, 3 * 2 * 2 * 64 + 2 * (8 + 2 + 2 + 8) * 8),
        (True, None, "auto", {"all-to-all"}, 576),
        (True, 12, "auto", {"collective-permute"}, 2 * 2 * 2 * 11),
        (False, None, "auto", {"all-to-all"}, 576),
        (False, None, "ring", {"collective-permute"}, 3 * 2 * 2 * 64),
    ],
)
def test_compiled_attention_sends_what_the_closed_form_says(
    causal: bool, window: int | None, transfer: Any, kinds: set[str], numbers: float
):
    call = functools.partial(attention, causal=causal, window=window, implementation=transfer)
    length, heads, kv_heads, size = 64, 8, 2, 8

    def placed(x: Any) -> Any:
        return sharding.constrain(x, "batch", "inner_seq", None, None)

    def step(*qkvg: Any) -> Any:
        out, backward = jax.vjp(call, *map(placed, qkvg[:3]))
        return placed(out), [*map(placed, backward(placed(qkvg[3])))]

    shapes = [(2, length, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with sharding.use(sharding.make_mesh("data=2,context=4")):
        text = jax.jit(step).lower(*arrays).compile().as_text()
    found = collectives.bytes_by_kind(collectives.collectives(hlo.read(text)))
    sent = {kind: size for kind, size in found.items() if size}
    assert sent.keys() == kinds
    # Of a ring's first step both passes send the same, which XLA does once.
    once = 2 * kv_heads * 16 if transfer == "ring" else 0
    assert sum(sent.values()) == (numbers - once) * size * 4  # in fp32
    exchange = Exchange((), 4, heads, kv_heads)
    of_keys = exchange.numbers_of_keys(length, Mask(causal, window), (window or 0) - 1)
    assert numbers == (exchange.numbers(length) if "all-to-all" in kinds else of_keys)


def test_a_ring_and_its_gradient_have_the_dtype_of_the_queries():
    q = jax.ShapeDtypeStruct((1, 16, 3, 8), jnp.bfloat16)
    call = functools.partial(attention, causal=True, implementation="ring")
    total = lambda q: call(q, q, q).astype(jnp.float32).sum()
    with sharding.use(sharding.make_mesh("context=2")):
        assert jax.eval_shape(call, q, q, q).dtype == jnp.bfloat16
        assert jax.eval_shape(jax.grad(total), q).dtype == jnp.bfloat16


def test_heads_that_the_parts_do_not_divide_are_not_exchanged():
    call = functools.partial(attention, causal=True)
    q = jax.ShapeDtypeStruct((1, 16, 3, 8), jnp.float32)
    message = "kernel='exchange': context=2 of the mesh does not divide the 3 heads of a device"
    with sharding.use(sharding.make_mesh("context=2")):
        jax.eval_shape(call, q, q, q)
        with pytest.raises(sharding.ShardingError, match=message):
            jax.eval_shape(functools.partial(call, implementation="exchange"), q, q, q)


def test_whole_documents_have_no_segments_where_keys_go_around(monkeypatch: Any):
    """They would cost a kernel a mask of zeros."""
    seen: list[Any] = []
    forward = Chunked.forward
    spy = lambda self, *args: seen.append(args[3]) or forward(self, *args)
    monkeypatch.setattr(Chunked, "forward", spy)
    call = functools.partial(attention, causal=True, implementation="ring")
    q = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)
    with sharding.use(sharding.make_mesh("context=2")):
        jax.eval_shape(call, q, q, q)
    assert seen
    assert set(seen) == {None}


# Whole steps


def gradients(make_model: Any, batch: dict[str, Any], loss: Any, mesh: str, **options: Any) -> Any:
    return one_step(make_model, loss, batch, mesh=zoo.make_mesh(mesh), **options)


def assert_same_step(got: Any, wanted: Any, rtol: float = 2e-6) -> None:
    assert got[0].keys() == wanted[0].keys()
    np.testing.assert_allclose(got[0]["loss"], wanted[0]["loss"], rtol=1e-6)
    np.testing.assert_allclose(got[0]["grad_norm"], wanted[0]["grad_norm"], rtol=1e-6)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted[1]))
    for x, want in zip(*map(jax.tree.leaves, (got[1], wanted[1])), strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=rtol * largest)


def token_batch(length: int, vocab: int = 32, rows: int = 8) -> dict[str, Any]:
    """Packed rows, as a dataset of tokens makes them."""
    tokens, targets = np.random.default_rng(0).integers(1, vocab, (2, rows, length), np.int32)
    ids = np.tile(np.asarray(segments(length)), (rows // 4, 1)).astype(np.int32)
    ids = np.where(np.arange(length) < length - 2, ids, 0)
    starts = np.diff(ids, axis=1, prepend=-1) != 0
    index = np.arange(length, dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    weights = (ids > 0).astype(np.float32)
    weights *= np.linspace(0.5, 1.5, rows, dtype=np.float32)[:, None]
    return {
        "tokens": tokens,
        "targets": targets,
        "weights": weights,
        "segment_ids": ids,
        "positions": positions.astype(np.int32),
    }


def transformer_of(**options: Any) -> Any:
    sizes: Any = {"d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 64}
    sizes["attention.num_kv_heads"] = 2
    config = configuration.replaced(zoo.transformer.Config(32), {**sizes, **options})
    return lambda key: zoo.transformer.Transformer(config, key=key)


def test_a_step_over_split_rows_is_that_of_one_device(monkeypatch: Any):
    """Of two microbatches with dropout, and logits of a step of time after another."""
    make, batch = transformer_of(dropout=0.1), token_batch(32)
    wanted = gradients(make, batch, losses.next_token, "", accumulate=2)
    monkeypatch.setattr(losses, "LOGITS_BYTES", 1)
    mesh = "fsdp=2,context=2,tensor=2"
    assert_same_step(gradients(make, batch, losses.next_token, mesh, accumulate=2), wanted)


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (31, {}, r"size 31 .* context=2"),
        (
            30,
            {"attention.kernel": "ring"},
            r"30 .* context=2: .* 4",
        ),
    ],
)
def test_rows_that_do_not_divide_are_refused(length: int, options: Any, message: str):
    make, batch = transformer_of(**options), token_batch(length)
    with pytest.raises(sharding.ShardingError, match=message):
        gradients(make, batch, losses.next_token, "fsdp=2,context=2")


EIGHT = {"num_heads": 8, "attention.head_dim": 4}  # which all meshes divide
WINDOWS = {"attention.window_pattern": ("local", "global"), "attention.window": 5}
DECODER = {"remat": "save:query,attention,mlp_hidden", "attention.soft_cap": 5.0, **WINDOWS}
EXCHANGED = {**EIGHT, "remat": "full", "dropout": 0.1, "attention.kernel": "exchange"}
EXPERTS = {"experts.num_experts": 4, "experts.per_token": 2, "attention.kernel": "ring"}
FAMILIES: dict[str, Any] = {
    "decoder": (transformer_of(**DECODER, **{"positions.kind": "learned"}), losses.next_token),
    "heads exchanged": (
        transformer_of(**EXCHANGED, **{"attention.soft_cap": 5.0}),
        losses.next_token,
    ),
    "experts": (transformer_of(**EXPERTS), losses.balanced_next_token(0.01)),
}


def rnn_of(**options: Any) -> Any:
    config = zoo.rnn.Config(vocab_size=32, hidden_size=32, num_layers=2, **options)
    return lambda key: zoo.rnn.RNN(config, key=key)


def classifier(key: Any) -> Any:
    sizes: Any = {"vocab_size": 32, "d_model": 32, "num_layers": 2, "num_heads": 4}
    body = zoo.transformer.Transformer(bert_config(**sizes, max_seq_len=64), key=key)
    return Classifier(body, 4, key=key)


def classified(batch: dict[str, Any]) -> dict[str, Any]:
    """Rows of tokens and padding, with a label each."""
    rows = len(batch["tokens"])
    return {
        "inputs": batch["tokens"],
        "mask": batch["segment_ids"] > 0,
        "labels": np.arange(rows, dtype=np.int32) % 4,
        "weights": np.ones(rows, np.float32),
    }


FAMILIES |= {
    "bert": (classifier, losses.classification),
    "ensemble": (
        lambda key: Ensemble(transformer_of(num_layers=1), 2, key=key),
        member_loss(losses.next_token),
    ),
}
EXTREMES = ("context=8", "fsdp=2,context=2,tensor=2")  # all of one axis, and most axes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [*zip(FAMILIES, itertools.cycle(EXTREMES))])
def test_families_over_split_rows(name: str, mesh: str):
    make, loss = FAMILIES[name]
    batch = classified(token_batch(32)) if name == "bert" else token_batch(32)
    one, many = (gradients(make, batch, loss, each) for each in ("", mesh))
    assert_same_step(many, one)


@pytest.mark.slow
def test_adapters_over_split_rows():
    def adapted(key: Any) -> Any:
        config = lora.Config(rank=2, dora=True, dropout=0.1)
        return lora.adapt(transformer_of(num_layers=1)(key), config, key=key)

    options = {"trainable": lora.trainable}
    batch = token_batch(32)
    wanted = gradients(adapted, batch, losses.next_token, "", **options)
    assert_same_step(gradients(adapted, batch, losses.next_token, EXTREMES[1], **options), wanted)


def test_chunks_of_time_come_back_in_order():
    x = jnp.arange(2 * 24).reshape(2, 24)
    two = jnp.stack([x, 3 * x], -1).astype(jnp.float32)
    with sharding.use(sharding.make_mesh("context=4")):
        found = chunked_loss.chunked_values(
            lambda logits, targets: (logits[..., 1], targets), 3, eqx.nn.Identity(), two, x
        )
    assert (found[0] == two[..., 1]).all()
    assert (found[1] == x).all()


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (rnn_of(cell="mingru"), (4, 8), "context=2"),
        (
            lambda key: mlp.MLP(mlp.Config(in_size=4, out_size=2), key=key),
            (4, 4),
            r"context=2 .* MLP's",
        ),
    ],
)
def test_models_that_take_no_part_of_a_row_are_refused(make: Any, inputs: Any, message: str):
    model = jax.eval_shape(make, jax.random.key(0))
    x = jax.ShapeDtypeStruct(inputs, jnp.float32 if "MLP" in message else jnp.int32)
    refused = pytest.raises(sharding.ShardingError, match=message)
    with sharding.use(sharding.make_mesh("context=2")), refused:
        eqx.filter_eval_shape(lambda model, x: model(x), model, x)


def test_kernels_of_whole_rows_are_refused(monkeypatch: Any):
    monkeypatch.setattr(sys.modules[attention.__module__], "platform", lambda: "gpu")
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    call = functools.partial(attention, causal=True, implementation="cudnn")
    message = "takes whole rows, and context=2 of the mesh splits"
    with sharding.use(sharding.make_mesh("context=2")), pytest.raises(ValueError, match=message):
        jax.eval_shape(call, q, q, q)


def test_texts_on_a_mesh_that_splits_rows_are_those_of_one_device():
    make = transformer_of(num_layers=1)
    prompt = [[3, 1, 4, 1, 5], [9, 2]]
    texts = []
    for mesh in (None, zoo.make_mesh("fsdp=2,context=2")):
        state = zoo.init_state(make, optax.sgd(0.1), key=jax.random.key(0), mesh=mesh)
        texts.append(zoo.generate(state.model, prompt, max_new_tokens=3, temperature=0.0))
    assert texts[0] == texts[1]
