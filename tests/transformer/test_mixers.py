"""Hybrids: layers of attention and of recurrences, by a pattern, in one transformer."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    VOCAB,
    arrays,
    assert_trees_close,
    drawn_rnn,
    drawn_transformer,
    hybrid,
    loss_and_gradient,
    make_transformer,
    small_config,
    state_and_step,
    token_batch,
    with_config,
)

import zoo
from zoo import losses
from zoo.common import configuration
from zoo.nn.products import dequantize, is_quantized
from zoo.nn.recurrences.chunks import RecurrenceConfig
from zoo.nn.recurrences.marks import Marks
from zoo.nn.recurrences.mixers import MIXERS
from zoo.nn.remat import apart
from zoo.publishing import PublishError
from zoo.transformer.flops import num_flops_per_token
from zoo.transformer.rotary import rotary_tables
from zoo.wrappers import lora

KEY = jax.random.key(0)


GATED = {"attention.output_gate": True, "positions.rotary_fraction": 0.5}
# Of which the loop runs two rounds, and one layer comes after it.
THREE_TO_ONE = {"mixer.pattern": ("mlstm", "mlstm", "attention"), "num_layers": 7}


# What layers there are


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, "global"),
        ({"mixer.pattern": ("mlstm",)}, "recurrent"),
        ({"mixer.pattern": ("mamba2", "mamba2", "attention")}, "recurrent recurrent global"),
        (
            {
                "mixer.pattern": ("attention", "mlstm"),
                "attention.window": 4,
                "attention.window_pattern": ("local", "local", "global"),
            },
            "local recurrent global recurrent local recurrent",
        ),
    ],
)
def test_kinds_of_layers_take_turns(changes, kinds):
    assert small_config(**changes).layer_kinds == tuple(kinds.split())


def test_layers_that_have_a_mixer_are_stacked_by_themselves():
    model = drawn_transformer(**hybrid(**THREE_TO_ONE))
    blocks = model.blocks
    found = {name: len(x) for name, x in arrays(eqx.filter(blocks, eqx.is_array)).items()}
    counts = {"attention": 2, "recurrence": 5}
    assert found == {name: counts.get(name.split(".")[0], 7) for name in found}
    layers = apart(blocks, model.config.own)
    with_attention = [index for index in range(7) if layers[index].recurrence is None]
    assert with_attention == [i for i in range(7) if layers[i].attention is not None] == [2, 5]
    np.testing.assert_array_equal(layers[5].attention.wq, blocks.attention.wq[1])
    np.testing.assert_array_equal(layers[6].recurrence.wq, blocks.recurrence.wq[4])
    np.testing.assert_array_equal(layers[6].mlp.w_up, blocks.mlp.w_up[6])


NORMS = ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")


@pytest.mark.parametrize(
    ("changes", "norms"),
    [
        (THREE_TO_ONE, {"recurrence": NORMS[:2], "attention": NORMS[:2]}),
        (
            {
                **{"mixer.pattern": ("mamba2", "attention")},
                **{"residual.norm_placement": "post", "mixer.norm_placement": "pre"},
            },
            {"recurrence": NORMS[:2], "attention": NORMS[2:]},
        ),
        (
            {
                **{"mixer.pattern": ("mamba2", "attention"), "mlp": "none", "d_ff": None},
                **{"residual.norm_placement": "post", "mixer.norm_placement": "pre"},
            },
            {"recurrence": NORMS[:1], "attention": NORMS[2:3]},
        ),
        (
            {"mixer.pattern": ("mamba2",), "num_layers": 2, "mlp": "none", "d_ff": None},
            {"recurrence": NORMS[:1]},
        ),
    ],
    ids=["three to one", "norms of its own", "no part in all layers", "no mlp"],
)
def test_a_hybrid_is_its_layers_one_after_another(changes, norms):
    """Written out: the residual stream, and in each layer the norms, the mixer and the MLP."""
    model = drawn_transformer(**hybrid(**changes))
    tokens = jnp.asarray(token_batch(2, 12)["tokens"])
    seen = set()

    def normed(layer: Any, name: str, x: Any) -> Any:
        return x if getattr(layer, name) is None else getattr(layer, name)(x)

    @eqx.filter_jit
    def written_out(model: Any, tokens: Any) -> Any:
        x, places = model.embedding(tokens), jnp.arange(12, dtype=jnp.int32)[None]
        rotary = rotary_tables(places, 8, 10_000.0)
        layers = apart(model.blocks, model.config.own)
        assert len(layers) == model.config.num_layers
        for layer in layers:
            mixer = "recurrence" if layer.attention is None else "attention"
            seen.add(mixer)
            assert {name for name in NORMS if getattr(layer, name) is not None} == {*norms[mixer]}
            y = normed(layer, "attention_norm", x)
            if layer.attention is None:
                y = layer.recurrence(y, layer.recurrence.initial_state(2), Marks())[1]
            else:
                y = layer.attention(y, None, rotary, None)
            x = x + normed(layer, "attention_out_norm", y)
            if layer.mlp is not None:
                y = layer.mlp(normed(layer, "mlp_norm", x))
                x = x + normed(layer, "mlp_out_norm", y)
        return model.final_norm(x) @ model.head.weight

    found = eqx.filter_jit(model)(tokens)
    assert_trees_close(found, written_out(model, tokens), rtol=2e-5)
    assert seen == norms.keys()
    if "attention" not in norms:  # no tables of positions
        assert model.embed(tokens, tokens)[1] == {"recurrent": None}


def test_the_norm_of_a_recurrence_has_an_epsilon_of_its_own():
    for kind in MIXERS:
        make = make_transformer(**hybrid(kind, **{"mixer.recurrence.norm_eps": 0.5}))
        blocks = eqx.filter_eval_shape(make, KEY).blocks
        norm = getattr(blocks.recurrence, "norm", blocks.recurrence)
        assert (norm.eps, blocks.mlp_norm.eps) == (0.5, 1e-6), kind
        config = RecurrenceConfig(norm_eps=0.25)
        model = eqx.filter_eval_shape(lambda: drawn_rnn(kind, num_layers=1, recurrence=config))  # noqa: B023
        [norm] = (getattr(x, "norm", x) for x in model.layers[0].directions)
        assert norm.eps == 0.25, kind


def test_what_layers_add_is_divided_by_their_number():
    wide = {"d_model": 64, "num_layers": 8, "mixer.recurrence.num_heads": 4, "num_heads": 4}
    for changes, parts in (({}, 16), ({"mlp": "none", "d_ff": None}, 8)):
        of_all = {**wide, **changes, "mixer.pattern": ("mlstm", "attention")}
        make = eqx.filter_jit(make_transformer(**of_all, **{"attention.head_dim": 16}))
        blocks = make(KEY).blocks
        for name in ("attention", "recurrence"):
            found = float(jnp.std(getattr(blocks, name).wo))
            assert found == pytest.approx((64 * parts) ** -0.5, rel=0.05), name


# What a position sees


@pytest.mark.parametrize("kind", MIXERS)
def test_packed_documents_are_those_of_rows_of_their_own(kind):
    """Three documents in every split over two rows, with padding before, behind and between them.

    Padding has other tokens; logits are the same, and sums of losses.
    """
    model = drawn_transformer(**hybrid(kind, num_layers=2))
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCAB, n) for n in (7, 5, 6)]

    @eqx.filter_jit
    def call(model: Any, tokens: Any, segment_ids: Any, positions: Any) -> Any:
        logits = model(tokens, segment_ids=segment_ids, positions=positions)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
        return logits, jnp.where(segment_ids > 0, chosen, 0.0).sum()

    def found(split: tuple[int, ...], before: int, between: int) -> tuple[list, float]:
        """Each document's logits, in the rows that `split` says, and the sum over all of them."""
        tokens = rng.integers(0, VOCAB, (3, 26)).astype(np.int32)
        segments, places = np.zeros((2, 3, 26), np.int32)
        ends, where = [before] * 3, []
        for index, (row, document) in enumerate(zip(split, documents, strict=True)):
            at = slice(ends[row], ends[row] + len(document))
            tokens[row, at], segments[row, at] = document, index + 1
            places[row, at] = np.arange(len(document))
            ends[row] = at.stop + between
            where.append((row, at))
        logits, total = call(model, *map(jnp.asarray, (tokens, segments, places)))
        return [np.asarray(logits)[each] for each in where], float(total)

    want, total = found((0, 1, 2), 0, 0)
    for split in itertools.product((0, 1), repeat=3):
        for before, between in ((0, 0), (2, 0), (1, 3)):
            got, sum_of_all = found(split, before, between)
            assert sum_of_all == pytest.approx(total, rel=1e-6)
            for x, y in zip(got, want, strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", MIXERS)
def test_a_token_changes_what_is_behind_it_alone(kind):
    model = drawn_transformer(**hybrid(kind, num_layers=2, **{"positions.kind": "learned"}))
    tokens = jnp.arange(12, dtype=jnp.int32)[None]

    @jax.jit
    def found(table: Any) -> Any:
        moved = eqx.tree_at(lambda m: m.embedding.weight, model, table)
        return moved(tokens)[0, 6].sum()

    moved = np.abs(jax.grad(found)(model.embedding.weight)).max(-1)[:12]
    assert (moved[7:] == 0).all()
    assert (moved[:7] > 1e-7).all()


# One maths however it runs


@pytest.mark.parametrize(
    ("num_layers", "kept"),
    [(3, "query,mlp_input"), pytest.param(1, "mlp_input", marks=pytest.mark.slow)],  # no round
)
def test_the_loop_and_what_it_keeps_change_nothing(num_layers, kept):
    model = drawn_transformer(**hybrid(num_layers=num_layers, remat=f"save:{kept}"))
    changes = {"scan_layers": False, "remat": "none"}
    again = with_config(model, configuration.replaced(model.config, changes))
    want, found = (loss_and_gradient(x, token_batch(2, 12)) for x in (model, again))
    assert_trees_close(found[0], want[0], rtol=1e-6)
    assert_trees_close(found[1], want[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        pytest.param("mamba2", "data=2,fsdp=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("mlstm", "context=4,tensor=2", marks=pytest.mark.slow),
        pytest.param("mamba2", "context=8", marks=pytest.mark.slow),
        ("gated_deltanet", "fsdp=2,context=2,tensor=2"),
    ],
)
def test_the_mesh_does_not_change_losses_and_gradients(kind, spec):
    """Documents go across the borders of a row's parts.

    Norms of outputs have a larger epsilon than usual: the first step of a document writes its value
    times q·k, and where that is near zero a norm enlarges rounding, on one device as on many. So
    does mlstm's normaliser nᵀq, which its floor e^-m keeps from zero where little comes in, as at a
    layer's start: with gates near 0 data=2, which splits no row, differs by 1.3e-5 too.
    """
    options = {**GATED, "num_layers": 2, "mixer.recurrence.norm_eps": 0.1}
    model = drawn_transformer(**hybrid(kind, **options))
    if kind == "mlstm":
        gates = lambda model: model.blocks.recurrence.gates.input
        model = eqx.tree_at(gates, model, replace_fn=lambda x: x - 2)
    want, found = (loss_and_gradient(model, token_batch(8, 16), mesh) for mesh in ("", spec))
    assert_trees_close(found[0], want[0], rtol=1e-6)
    assert_trees_close(found[1], want[1], rtol=1e-5)


@pytest.mark.slow
def test_a_hybrid_trains_on_a_mesh_in_low_precision():
    make, found = make_transformer(**hybrid(num_layers=2, dropout=0.1, **GATED)), []
    options: Any = {"mesh": zoo.make_mesh("data=2,fsdp=2,tensor=2"), "precision": "bf16"}
    state, step = state_and_step(make, losses.next_token, optax.adam(1e-2), **options)
    for _ in range(8):
        state, metrics = step(state, token_batch())
        found.append(float(metrics["loss"]))
    assert found[-1] < 0.8 * found[0]
    assert state.model.blocks.recurrence.gates.bias.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits"), [("mamba2", "int4"), ("gated_deltanet", "int4"), ("mlstm", "int8")]
)
def test_adapters_train_beside_quantised_matrices_of_recurrent_layers(kind, bits, tmp_path):
    """As beside plain matrices of the same numbers, which are not those before."""
    plain = drawn_transformer(**hybrid(kind, num_layers=2, **GATED))
    zoo.save(tmp_path / "base", plain)
    base = zoo.load(tmp_path / "base", quantize=bits)
    found = base.blocks.recurrence
    assert all(map(is_quantized, (found.wz, found.wo, base.blocks.attention.wg)))
    adapted, same = (lora.adapt(x, lora.Config(rank=2), key=KEY) for x in (base, dequantize(base)))
    found = adapted.blocks.recurrence
    assert all(map(lora.is_adapted, (found.wz, found.wo, adapted.blocks.attention.wg)))
    batch = jax.tree.map(jnp.asarray, token_batch(2, 12))

    @eqx.filter_jit
    def gradients_of_adapters(model: Any) -> tuple:
        trained, rest = eqx.partition(model, lora.trainable(model))
        total = lambda x: losses.next_token(eqx.combine(x, rest), batch, None)[0]
        return eqx.filter_value_and_grad(total)(trained)

    (loss, gradient), (want, expected) = map(gradients_of_adapters, (adapted, same))
    assert_trees_close(loss, want, rtol=1e-5)
    assert_trees_close(gradient, expected, rtol=1e-3, atol=1e-5)
    assert abs(losses.next_token(plain, batch, None)[0] / float(loss) - 1) > 1e-4


def test_flops_are_those_of_each_kind_of_layer():
    def count(**changes: Any) -> float:
        return num_flops_per_token(small_config(num_layers=4, **changes), 64)

    attention, recurrent = count(), count(**{"mixer.pattern": ("mlstm",)})
    mixed = count(**{"mixer.pattern": ("mlstm", "mlstm", "mlstm", "attention")})
    assert mixed == pytest.approx((3 * recurrent + attention) / 4)
    settings = {"mixer.pattern": ("mlstm",), "mixer.recurrence.chunk": 16}
    per_layer = MIXERS["mlstm"].num_products(small_config(**settings).mixer.recurrence, 32, 32, 16)
    without = count(mlp="none", d_ff=None, **settings)
    assert without == pytest.approx(6 * (4 * per_layer + 32 * VOCAB))


# What cannot be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer.pattern": ()}, r"mixer\.pattern=\(\)"),
        ({"mixer.pattern": ("mamba2", "mlstm")}, "mixer.pattern.*mamba2 and mlstm"),
        ({"mixer.pattern": ("attention", "mlstm"), "causal": False}, "mlstm.*causal=False"),
        ({"mixer.recurrence.num_heads": 2}, r"mixer\.recurrence\.num_heads=2.*'attention'"),
        ({**hybrid("mlstm"), "mixer.recurrence.taps": 3}, r"mixer\.recurrence\.taps=3.*'mlstm'"),
        ({**hybrid(), "mixer.recurrence.num_heads": 0}, r"mixer\.recurrence\.num_heads=0"),
        ({**hybrid(), "mixer.recurrence.num_heads": 5}, r"num_heads=5 .* d_model=32"),
        ({**hybrid(), "mixer.recurrence.num_key_heads": 3}, "num_key_heads=3"),
        ({"mixer.pattern": ("mlstm",), "remat": "save:query"}, "remat='save:query'"),
        ({"mixer.norm_placement": "pre"}, "mixer.norm_placement='pre'.*'attention'"),
        (
            {"mixer.pattern": ("mlstm",), "mixer.norm_placement": "pre"},
            "mixer.norm_placement='pre'.*'mlstm'",
        ),
        (
            {**hybrid(), "mixer.norm_placement": "post", "residual.norm_placement": "stream"},
            "mixer.norm_placement='post'.*'stream'",
        ),
        ({"mixer.recurrence.norm_eps": 1e-5}, r"mixer\.recurrence\.norm_eps=1e-05.*'attention'"),
        ({"mlp": "none"}, "d_ff=64"),
        ({"mlp": "none", "d_ff": None, "remat": "save:mlp_hidden"}, "remat='save:mlp_hidden'"),
        ({"mlp": "none", "d_ff": None, "experts.num_experts": 2}, "experts.num_experts=2.*'none'"),
    ],
)
def test_what_layers_cannot_be_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small_config(**changes)


def test_hugging_face_has_no_such_model(tmp_path):
    with pytest.raises(PublishError, match=r"mixer\.pattern="):
        zoo.save(tmp_path / "model", drawn_transformer(**hybrid()), format="hf")
