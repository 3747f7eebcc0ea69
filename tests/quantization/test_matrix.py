"""Quantised matrices: their values, their products, models of them, and how these are loaded."""

import dataclasses
from pathlib import Path
from typing import get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_trees_close,
    drawn_model,
    equations,
    one_step,
    value_and_gradients,
)

import zoo
from zoo import sharding, transformer
from zoo.common import configuration
from zoo.nn.products import Kind, Quantized, dequantize, is_quantized
from zoo.publishing import PublishError
from zoo.publishing.formats import Options
from zoo.publishing.models import skeleton
from zoo.quantization import codes as codes_module
from zoo.quantization import loading
from zoo.quantization.codes import NF4
from zoo.quantization.matrix import quantize
from zoo.training import losses
from zoo.training.state import trained_leaves

KINDS = get_args(Kind)
CONFIG = transformer.Config(
    vocab_size=64,
    d_model=64,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    attention=transformer.AttentionConfig(num_kv_heads=2),
)
TOKENS = np.arange(32, dtype=np.int32).reshape(4, 8) % 50


def matrix(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def reference(w, kind, group):
    """The values and the largest errors by the formulas of the papers, of a matrix [in, out]."""
    size = {"int8": w.shape[0]}.get(kind, group)
    blocks = w.reshape(-1, size, w.shape[1])
    top = {"int8": 127, "int4": 7, "nf4": 1}[kind]
    scale = np.asarray(np.abs(blocks).max(1, keepdims=True) / top).astype(jnp.bfloat16)
    scale = scale.astype(np.float32)
    if kind == "nf4":
        book = np.asarray(NF4, np.float32)
        values = book[np.abs(blocks[..., None] / scale[..., None] - book).argmin(-1)] * scale
        step = np.diff(book).max() * scale
    else:
        values = np.clip(np.round(blocks / scale), -top, top) * scale
        step = scale
    # The scale is rounded to bf16, and with it the largest value.
    bound = step / 2 + 2.0**-8 * np.abs(blocks).max(1, keepdims=True)
    return values.reshape(w.shape), np.broadcast_to(bound, blocks.shape).reshape(w.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_formulas(kind):
    w = matrix(128, 48)
    q = quantized((128, 48), ("embed", "mlp"), kind)
    values, bound = reference(w, kind, 64)
    np.testing.assert_allclose(q.value(), values, rtol=1e-6)
    assert (np.abs(np.asarray(q.value()) - w) <= bound).all()
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(q))
    assert num_bytes * 8 / w.size == {"int8": 8 + 16 / 128}.get(kind, 4 + 16 / 64)
    assert (q.shape, q.dtype) == (w.shape, jnp.float32)


def test_packing_keeps_the_codes_of_a_group_together():
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 12, 5)), jnp.uint8)
    packed = codes_module.pack(codes, -2, 4)
    assert packed.shape == (2, 6, 5)
    assert packed.dtype == jnp.uint8
    assert packed[0, 0, 0] == codes[0, 0, 0] + 16 * codes[0, 2, 0]
    np.testing.assert_array_equal(codes_module.unpack(packed, -2, 4), codes)
    # A part of whole groups is packed as it is in the whole.
    np.testing.assert_array_equal(packed[:, 2:4], codes_module.pack(codes[:, 4:8], -2, 4))


def test_zero_points():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (64, 6))
    zeros, scales = rng.integers(0, 16, (2, 6)), matrix(2, 6)
    plain = quantized((64, 6), ("embed", "mlp"), "int4", 32)
    q = dataclasses.replace(
        plain,
        codes=codes_module.pack(jnp.asarray(codes), 0, 32),
        scales=jnp.asarray(scales),
        zeros=jnp.asarray(zeros, jnp.uint8),
    )
    values = (codes.reshape(2, 32, 6) - zeros[:, None]) * scales[:, None]
    np.testing.assert_allclose(q.value(), values.reshape(64, 6), rtol=1e-6)
    for rows in (1, 3):
        x = matrix(rows, 64, seed=1)
        found = times(q, jnp.asarray(x))
        np.testing.assert_allclose(found, x @ values.reshape(64, 6), rtol=1e-4, atol=1e-4)


times = eqx.filter_jit(lambda q, x, **options: q.times(x, **options))


def quantized(shape, names, kind, *group, seed=0):
    return eqx.filter_jit(quantize)(jnp.asarray(matrix(*shape, seed=seed)), names, kind, *group)


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients(kind):
    names = {"wq": ("embed", "heads", "head_dim"), "wo": ("heads", "head_dim", "embed")}
    for name, shape in (("wq", (64, 2, 32)), ("wo", (2, 32, 64))):
        q, inner = quantized(shape, names[name], kind), 1 + (name == "wo")
        w, rows = np.asarray(q.value()).reshape(64, 64), (1, 5, 20)  # each has a form of its own
        xs = [jnp.asarray(matrix(n, *shape[:inner], seed=1)) for n in rows]

        @eqx.filter_jit
        def run(q, xs, inner=inner):
            def one(x):
                return value_and_gradients(
                    lambda x: q.times(x, contract=inner), q.times(x, contract=inner), x
                )

            return [one(x) for x in xs]

        for n, x, (out, gradient) in zip(rows, xs, run(q, xs), strict=True):
            assert out.shape == (n, *shape[inner:])
            flat = np.asarray(x).reshape(n, 64)
            np.testing.assert_allclose(np.asarray(out).reshape(n, 64), flat @ w, atol=2e-4)
            expected = (flat @ w) @ w.T
            np.testing.assert_allclose(np.asarray(gradient).reshape(n, 64), expected, atol=1e-2)


def test_products_in_bf16_are_of_bf16_and_of_the_dtype_asked_for():
    q = quantized((64, 32), ("embed", "mlp"), "int4").cast(jnp.bfloat16)
    x = jnp.asarray(matrix(3, 64, seed=1), jnp.bfloat16)
    assert jax.eval_shape(q.times, x).dtype == jnp.bfloat16
    found = times(q, x, dtype=jnp.float32)
    assert found.dtype == jnp.float32
    assert q.scales.dtype == jnp.bfloat16
    assert q.value().dtype == jnp.bfloat16
    w = np.asarray(q.value(), np.float32)
    np.testing.assert_allclose(found, np.asarray(x, np.float32) @ w, rtol=1e-2, atol=0.1)


def test_codes_that_share_a_byte_are_never_all_in_memory():
    q = quantized((64, 32), ("embed", "mlp"), "int4")
    gradient = jax.grad(lambda x: jnp.square(q.times(x)).sum())
    program = equations(jax.make_jaxpr(gradient)(jnp.ones((3, 64))))
    assert max(x.aval.size for each in program for x in each.outvars) == 64 * 32 // 2


@pytest.mark.parametrize("rows", [1, 20])
def test_codes_of_eight_bits_are_multiplied_without_rounding(rows):
    q = quantized((64, 32), ("embed", "mlp"), "int8").cast(jnp.bfloat16)
    x = jnp.asarray(matrix(rows, 64, seed=1), jnp.bfloat16)
    exact = [np.asarray(a, np.float64) for a in (x, q.codes, q.scales)]
    wanted = exact[0] @ exact[1] * exact[2]
    times = lambda x: q.times(x, dtype=jnp.float32)
    np.testing.assert_allclose(times(x), wanted, rtol=1e-4, atol=1e-5)
    # A few rows, two at least, are a sum of products, which XLA for CPU does in one pass.
    forms = [
        (e.primitive.name, e.invars[0].aval.shape[0])
        for e in equations(jax.make_jaxpr(times)(x))
        if e.primitive.name in ("dot_general", "reduce_sum")
    ]
    assert forms == [("reduce_sum", max(rows, 2)) if rows < 20 else ("dot_general", rows)]
    assert np.abs(exact[0] @ np.asarray(q.value(), np.float64) - wanted).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_rows_and_is_a_head(kind):
    w = matrix(96, 64)
    q = quantized((96, 64), ("vocab", "embed"), kind)
    values, _ = reference(w.T, kind, 64)
    np.testing.assert_allclose(q.value(), values.T, rtol=1e-6)
    ids = jnp.asarray([[3, 95], [1000, 0]])
    np.testing.assert_array_equal(q.rows(ids), q.value()[jnp.asarray([[3, 95], [95, 0]])])
    x = matrix(2, 3, 64, seed=1)
    head = q.transposed()
    assert head.shape == (64, 96)
    assert q.shape == (96, 64)
    np.testing.assert_allclose(times(head, jnp.asarray(x)), x @ values, atol=2e-4)


def test_groups_are_divisors_and_8_bits_where_there_are_none():
    groups = {}
    for size in (128, 96, 40, 70, 33, 6):
        w = jax.ShapeDtypeStruct((size, 4), jnp.float32)
        q = eqx.filter_eval_shape(quantize, w, ("embed", "mlp"), "int4")
        groups[size] = (q.kind, size // q.scales.shape[0])
        assert q.shape == (size, 4)
    assert groups == {
        128: ("int4", 64), 96: ("int4", 48), 40: ("int4", 40), 70: ("int4", 14),
        33: ("int8", 33), 6: ("int8", 6),
    }  # fmt: skip


def test_what_cannot_be_quantised_is_named():
    with pytest.raises(ValueError, match=r"group_size=4: .* 8"):
        quantize(jnp.zeros((8, 8)), ("embed", "mlp"), "int4", 4)
    zeros = quantize(jnp.zeros((16, 4)), ("embed", "mlp"), "int4", 8)
    assert zeros.scales.shape == (2, 4)
    assert not zeros.value().any()
    with pytest.raises(PublishError, match=r"quantize='int3': .* int8, int4, nf4"):
        Options(quantize="int3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = drawn_model(lambda key: transformer.Transformer(CONFIG, key=key))
    zoo.save(tmp_path_factory.mktemp("quantized") / "model", model)
    return tmp_path_factory.getbasetemp() / "quantized0" / "model"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_loading_by_layers_is_quantising_the_whole(folder, kind):
    plain, model = zoo.load(folder), zoo.load(folder, quantize=kind)
    assert jax.tree.structure(skeleton(folder, quantize=kind)) == jax.tree.structure(model)
    nodes = {"wo": plain.blocks.attention.wo, "head": plain.head.weight}
    wo = quantize(nodes["wo"], (None, "heads", "head_dim", "embed"), kind)
    head = quantize(nodes["head"], ("embed", "vocab"), "int8")  # whatever the kind
    table = quantize(plain.embedding.weight, ("vocab", "embed"), "int8")
    found = (model.blocks.attention.wo, model.head.weight, model.embedding.weight)
    for ours, whole in zip(found, (wo, head, table), strict=True):
        assert isinstance(ours, Quantized)
        assert ours.kind == whole.kind
        assert_trees_close(ours, whole, rtol=0)
    assert not is_quantized(model.final_norm.scale)


def test_a_host_holds_a_layer_at_a_time(folder, monkeypatch):
    sizes = []
    made = loading._quantize
    monkeypatch.setattr(
        loading, "_quantize", lambda part, *rest: (sizes.append(part.shape), made(part, *rest))[1]
    )
    zoo.load(folder, quantize="int8")
    assert (1, 64, 4, 16) in sizes
    assert all(len(s) == 2 or s[0] == 1 for s in sizes)


def test_sharded_models_are_those_of_one_device(folder):
    model, mesh = zoo.load(folder, quantize="int8"), zoo.make_mesh("fsdp=2,tensor=2")
    placed = zoo.load(folder, quantize="int8", mesh=mesh)
    codes = placed.blocks.attention.wq.codes
    assert codes.sharding.shard_shape(codes.shape)[2] == 2
    forward = eqx.filter_jit(lambda model, tokens: model(tokens))
    expected = forward(model, TOKENS)
    with sharding.use(mesh):
        found = forward(placed, TOKENS)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_a_mesh_that_cuts_groups_is_refused(folder):
    names = (None, "embed", "heads", "head_dim")
    model = zoo.load(folder)
    wq = quantize(jnp.ones((2, 96, 4, 16)), names, "int4", 32)
    model = eqx.tree_at(lambda m: m.blocks.attention.wq, model, wq)
    with pytest.raises(sharding.ShardingError, match=r"wq\.scales of shape .*3"):
        sharding.shardings(model, zoo.make_mesh("fsdp=2"))


def test_a_hugging_face_folder_is_quantised():
    folder = Path(__file__).parents[1] / "golden" / "hf" / "llama3"
    golden, model = np.load(folder / "golden.npz"), zoo.load(folder, quantize="int8")
    assert is_quantized(model.blocks.mlp.w_up)
    wanted, found = golden["logits"], np.asarray(eqx.filter_jit(model)(golden["tokens"]))
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < error < 0.1


def test_decoding_is_the_forward_pass(folder):
    model = zoo.load(folder, quantize="int4")
    found = zoo.generate(model, TOKENS[:1, :4], max_new_tokens=3, temperature=0.0, stop_tokens=())
    logits = eqx.filter_jit(model)(jnp.asarray(found))
    np.testing.assert_array_equal(logits[0, 3:-1].argmax(-1), np.asarray(found)[0, 4:])


def test_an_adapter_on_a_quantised_matrix_alone_is_trained(folder):
    model = zoo.load(folder, quantize="int4")
    model = zoo.lora.adapt(model, zoo.lora.Config(rank=2), key=jax.random.key(1))
    chosen = trained_leaves(model, zoo.lora.trainable)
    assert sum(jax.tree.leaves(chosen)) == 2 * 7
    wq = jax.tree.map(lambda x: x[0], model.blocks.attention.wq)
    assert is_quantized(wq.weight)
    wq = dataclasses.replace(wq, up=jnp.ones_like(wq.up))
    x = matrix(3, 64)

    def gradient(down, weight):
        node = dataclasses.replace(wq, down=down, weight=weight)
        return jnp.square(node.times(jnp.asarray(x))).sum()

    run = eqx.filter_jit(jax.grad(gradient))
    found, expected = run(wq.down, wq.weight), run(wq.down, wq.weight.value())
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-2)


def first_step(model, mesh=None, precision="fp32"):
    """The loss of a step, and the gradient of each adapter by its path."""

    def make(key, model):
        model = zoo.lora.adapt(model, zoo.lora.Config(rank=2), key=key)
        ups = lambda m: [
            x.up for x in jax.tree.leaves(m, is_leaf=zoo.lora.is_adapted) if zoo.lora.is_adapted(x)
        ]
        rng = np.random.default_rng(0)
        drawn = [jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype) for x in ups(model)]
        return eqx.tree_at(ups, model, drawn)  # else nothing but they has a gradient

    tokens = np.arange(8 * 16, dtype=np.int32).reshape(8, 16) * 7 % 50
    targets = np.roll(tokens, -1, axis=1)
    batch = {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}
    options = {"mesh": mesh, "trainable": zoo.lora.trainable, "precision": precision}
    metrics, found = one_step(make, losses.next_token, batch, pretrained=model, **options)
    trained = {name: x for name, x in found.items() if name.endswith((".down", ".up"))}
    assert len(trained) == 2 * 7
    assert not any(x.any() for name, x in found.items() if name not in trained)
    return metrics["loss"], trained


def assert_same_step(found, expected, rtol):
    assert found[0] == pytest.approx(expected[0], rel=rtol)
    for name, gradient in expected[1].items():
        size = np.linalg.norm(gradient)
        assert size > 1e-3, name
        assert np.linalg.norm(found[1][name] - gradient) < rtol * size, name


@pytest.mark.slow
def test_sharded_adapters_train_as_on_one_device(tmp_path):
    """Of a model whose inputs are eight groups."""
    config = configuration.replaced(CONFIG, {"d_model": 512, "attention.head_dim": 16})
    wide = drawn_model(lambda key: transformer.Transformer(config, key=key), 0.05)
    zoo.save(tmp_path / "wide", wide)
    expected = first_step(zoo.load(tmp_path / "wide", quantize="int4"))
    mesh = zoo.make_mesh("fsdp=8")
    placed = zoo.load(tmp_path / "wide", quantize="int4", mesh=mesh)
    codes = placed.blocks.attention.wq.codes
    assert len({tuple(map(str, s.index)) for s in codes.addressable_shards}) == mesh.size
    assert_same_step(first_step(placed, mesh), expected, 1e-4)


@pytest.mark.slow
def test_adapters_train_under_remat_and_in_bf16(folder):
    expected = first_step(zoo.load(folder, quantize="nf4"))
    remat = zoo.load(folder, quantize="nf4", overrides={"remat": "full"})
    assert remat.config.remat == "full"
    assert_same_step(first_step(remat), expected, 1e-5)
    loss, low = first_step(remat, precision="bf16")
    assert loss == pytest.approx(expected[0], rel=0.01)
    together = lambda x: np.concatenate([x[name].ravel() for name in expected[1]])
    wanted = together(expected[1])
    assert np.linalg.norm(together(low) - wanted) < 0.2 * np.linalg.norm(wanted)


def test_adapters_over_a_quantised_base_are_stored(folder, tmp_path):
    base = zoo.load(folder, quantize="int4")
    config = zoo.lora.Config(rank=2, targets=("blocks.attention.w[qo]",))
    model = zoo.lora.adapt(base, config, key=jax.random.key(1))
    up = jnp.full_like(model.blocks.attention.wq.up, 0.5)
    model = eqx.tree_at(lambda m: m.blocks.attention.wq.up, model, up)
    zoo.save_adapters(tmp_path / "adapters", model, base=folder)
    again = zoo.load(tmp_path / "adapters", quantize="int4")
    assert_trees_close(again, model, rtol=0)
    plain = zoo.load(tmp_path / "adapters")
    assert not is_quantized(plain.blocks.attention.wq.weight)
    np.testing.assert_array_equal(plain.blocks.attention.wq.up, up)


def test_a_quantised_model_is_not_saved(folder, tmp_path):
    model = zoo.load(folder, quantize="int8")
    with pytest.raises(PublishError, match="the model is quantised"):
        zoo.save(tmp_path / "m", model)
    zoo.save(tmp_path / "m", dequantize(model))
    np.testing.assert_array_equal(zoo.load(tmp_path / "m").head.weight, model.head.weight.value())
