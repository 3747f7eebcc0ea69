"""zoo.planning.flops: operations of a traced step by hand and by formula, and bytes of kernels."""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import flash, make_transformer, small_config
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from planning_cases import job, moved, small_estimate

import zoo
from zoo import sharding, transformer
from zoo.nn import remat
from zoo.nn.attention import attention, masks
from zoo.nn.attention.masks import Mask
from zoo.nn.attention.splash import Blocks
from zoo.planning import (
    command,
    costs,
    flops,
    hlo,
    roofline,
    targets,
)
from zoo.planning.job import make_estimate
from zoo.training import chips
from zoo.transformer.dispatch import RARELY

KEY = jax.random.key(0)


def traced_flops(wanted, policy=None):
    """FLOPs without a compile."""
    with remat.overridden(policy):
        state = wanted.training.blueprint(jax.random.key(0), mesh=None).skeleton
        step = wanted.training.step(mesh=None, precision="fp32")
        return flops.count(step.trace(state, wanted.batch).jaxpr)


def test_step_flops_match_the_formula():
    sizes = {"num_layers": 3, "attention.kernel": "xla", "causal": False}
    wanted, config = job(model=sizes), small_config(**sizes)
    plain, again = traced_flops(wanted), traced_flops(wanted, "full")
    assert plain == pytest.approx(wanted.training.flops_per_token * wanted.tokens)
    head = 6 * config.d_model * config.vocab_size * wanted.tokens
    # Forward again: a third more, but for the head, and the last product of a layer.
    last = 2 * config.d_model * config.hidden_size * config.num_layers * wanted.tokens
    assert again == pytest.approx((plain - head) * 4 / 3 - last + head)


def test_flops_count_loops_and_branches():
    def f(x):
        x = jax.lax.fori_loop(0, 7, lambda _, x: x @ x, x)
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert flops.count(jax.make_jaxpr(f)(jnp.ones((4, 4)))) == (7 + 2) * 2 * 4**3


def test_a_branch_that_is_seldom_taken_is_left_out():
    """Of the FLOPs that are traced, and of the bytes and the time of the compiled program."""

    def f(x):
        def times(turns, x):
            return jax.lax.fori_loop(0, turns, lambda _, x: jnp.sin(x @ x), x).sum()

        def seldom(x):
            with jax.named_scope(RARELY):
                return times(50, x)

        return jax.lax.cond(x[0, 0] > 0, functools.partial(times, 2), seldom, x)

    x = jnp.ones((64, 64))
    assert flops.count(jax.make_jaxpr(jax.grad(f))(x)) == 2 * 3 * 2 * 64**3
    program = hlo.read(jax.jit(f).lower(x).compile().as_text())
    assert "conditional" in {x.opcode for x in program.entry.instructions.values()}
    assert costs.memory_traffic(program) < 30 * x.nbytes


def test_products_of_a_dtype_are_counted():
    def f(x, codes):
        y = jax.lax.dot(codes, codes, preferred_element_type=jnp.int32)
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x), y

    jaxpr = jax.make_jaxpr(f)(jnp.ones((4, 4)), jnp.ones((5, 5), jnp.int8))
    assert flops.count(jaxpr) == 2 * (3 * 4**3 + 5**3)
    assert flops.count(jaxpr, of=jnp.int8) == 2 * 5**3


def test_products_of_int8_have_a_rate_of_their_own():
    estimate = dataclasses.replace(small_estimate(), target=targets.parse("h100:8"))
    some = dataclasses.replace(estimate, int8_flops=estimate.flops / 4)
    rest = estimate.flops / 8 / chips.CHIPS["h100"].flops * 3 / 4
    int8 = estimate.flops / 8 / 1979e12 / 4
    assert roofline.roofline(some).compute == pytest.approx(rest + int8)


def test_a_loop_of_unknown_length_is_refused():
    f = lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ x, x)
    with pytest.raises(ValueError, match=r"a loop with products.*jax\.lax\.scan"):
        flops.count(jax.make_jaxpr(f)(jnp.ones((4, 4))))
    counted = lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x + x, x)
    assert flops.count(jax.make_jaxpr(counted)(jnp.ones((4, 4)))) == 0


def kernel_call(estimate=None):
    """A product by blocks: those of the left are kept along the second axis of the grid."""

    def kernel(x_ref, y_ref, z_ref):
        z_ref[...] = x_ref[...] @ y_ref[...]

    call = pl.pallas_call(
        kernel,
        grid=(4, 2),
        in_specs=[
            pl.BlockSpec((8, 32), lambda i, j: (i, 0)),
            pl.BlockSpec((32, 16), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((8, 16), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
        cost_estimate=estimate,
    )
    return jax.make_jaxpr(call)(jnp.ones((32, 32)), jnp.ones((32, 32)))


def test_kernels_count_by_their_grid_or_their_estimate():
    assert flops.count(kernel_call()) == 2 * 32**3
    assert moved(kernel_call()) == 4 * (4 * 8 * 32 + 8 * 32 * 16 + 8 * 8 * 16)
    estimated = kernel_call(pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=9))
    assert (flops.count(estimated), moved(estimated)) == (7, 9)


def test_kernels_over_groups_move_a_matrix_of_a_group_once():
    """Three groups of 1,024 rows: tiles of 128 rows, 512 inputs and 256 of 512 outputs."""
    rows, inner, outer, groups, tile, half = 1024, 512, 512, 3, 128, 256
    x = jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((groups, inner, outer), jnp.bfloat16)
    g = jax.ShapeDtypeStruct((rows, outer), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    tiling, steps = (tile, inner, half), rows // tile + groups - 1

    def counted(product, *operands, share=""):
        def call(*args):
            with jax.numpy_dtype_promotion("standard"), jax.named_scope(share or "all"):
                return product(*args, jnp.bfloat16, tiling)

        jaxpr = jax.make_jaxpr(call)(*operands, sizes).jaxpr
        ((name, (executed, moved)),) = flops.of_kernels(jaxpr).items()
        assert name == product.__name__  # as the compiled program has it
        return flops.count(jaxpr), executed, moved / 2

    product = 2 * rows * inner * outer
    assert counted(gmm, x, w) == (
        product,
        product * steps * tile / rows,
        2 * rows * inner + groups * inner * outer + rows * outer,
    )
    # The rows go with each of two halves of the outputs, the gradients with the inputs once.
    assert counted(tgmm, jax.ShapeDtypeStruct((inner, rows), jnp.bfloat16), g) == (
        product,
        product * steps * tile / rows,
        2 * rows * inner + rows * outer + groups * inner * outer,
    )
    # With parts of the inputs, nothing stays from one step to the next but the outputs.
    tiling = (tile, half, outer)
    assert counted(gmm, x, w)[2] == (steps * tile * inner + steps * inner * outer + rows * outer)
    # Of rows of which half are for other devices' groups, half of the tiles.
    tiling = (tile, inner, half)
    assert counted(gmm, x, w, share="runs_1_of_2_steps") == (
        product / 2,
        product / 2 * steps * tile / rows,
        (2 * inner + outer) * tile * steps / 2 + groups * inner * outer,
    )


def test_a_kernel_without_a_table_of_its_steps_is_refused():
    def call(x, steps):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))

        def copy(x_ref, y_ref):
            y_ref[...] = x_ref[...]

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            copy, grid=(steps,), in_specs=[spec], out_specs=spec, out_shape=shape
        )(x)

    jaxpr = jax.make_jaxpr(call)(jnp.ones((32, 128)), 4).jaxpr
    with pytest.raises(ValueError, match=r"copy.*its grid is known only as it runs"):
        moved(jaxpr)


@pytest.mark.parametrize("mesh", ["", "fsdp=2,tensor=4"])
@pytest.mark.parametrize("mask", [Mask(True, None), Mask(True, 600), Mask(False, None)])
def test_flash_attention_counts_the_blocks_that_it_sees(mask, mesh, monkeypatch):
    monkeypatch.setattr(masks, "CPU_CHUNK", 512)
    q = jax.ShapeDtypeStruct((2, 2048, 8, 128), jnp.float32)

    def counted(attend):
        total = lambda *qkv: attend(*qkv).sum()
        return flops.count(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, q, q))

    options = {"causal": mask.causal, "window": mask.window, "scale": 1.0}
    own = counted(functools.partial(attention, **options, implementation="chunked"))
    with sharding.use(sharding.make_mesh(mesh, jax.devices()[: 8 if mesh else 1])):
        kernel = counted(flash(mask, blocks=Blocks(512, 512, 512)))
        fused = counted(flash(mask, blocks=Blocks(512, 512, 512), fused=True))
    # Of the same chunks; its two kernels of the backward pass both compute the logits.
    output_times_gradient = 2 * math.prod(q.shape)
    assert kernel == own * 9 / 7 + output_times_gradient
    if mask.window is None:  # else its steps over blocks which nothing sees count too
        assert fused == own + output_times_gradient


@pytest.mark.parametrize("mesh", ["", "fsdp=2,tensor=4"])
@pytest.mark.parametrize("policy", ["dots", "full"])
def test_remat_runs_a_flash_kernel_forward_once(policy, mesh):
    q = jax.ShapeDtypeStruct((2, 256, 8, 128), jnp.bfloat16)
    attend = flash(Mask(True, None), blocks=BLOCKS)

    def counted(policy):
        call = remat.checkpoint(attend, policy)
        total = lambda *qkv: call(*qkv).astype(jnp.float32).sum()
        traced = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, q, q)
        return flops.count(traced), moved(traced)

    with sharding.use(sharding.make_mesh(mesh, jax.devices()[: 8 if mesh else 1])):
        assert counted(policy) == counted("none")
        assert counted("none")[0] > 0


BLOCKS = Blocks(128, 128, 128)


EXPERTS = {"attention.kernel": "xla", "causal": False, "mlp": "swiglu", "experts.num_experts": 4}


def test_products_of_experts_are_counted_on_any_mesh():
    wanted = job(model=EXPERTS)
    found = traced_flops(wanted)
    assert found == pytest.approx(wanted.training.flops_per_token * wanted.tokens)
    done = jax.jit(lambda x: x).lower(1.0).compile()  # in place of a step's program
    sharded = dataclasses.replace(wanted, mesh="fsdp=2,tensor=4")
    estimate = make_estimate(sharded, targets.parse("cpu:8"), compiled=done)
    assert estimate.flops == found


DENSE = {"attention.kernel": "xla", "causal": False}


@pytest.mark.parametrize(
    ("model", "whole"),
    [
        (DENSE, ()),
        (DENSE, ("embedding.weight", "head.weight")),
        (DENSE | {"tie_embeddings": True}, ("embedding.weight",)),
        (EXPERTS, ()),
    ],
)
def test_useful_flops_of_adapters_leave_out_gradients_of_the_base(model, whole):
    sizes, target = small_config(num_layers=3, **model), targets.parse("cpu:8")
    if (
        "experts.num_experts" in model
    ):  # whose adapters are merged, a product that the maths does not need
        only = {"lora": zoo.lora.Config(rank=2, targets=("blocks.attention.*",))}
    else:
        only = {"lora": zoo.lora.Config(rank=2, whole=whole)}
    config = command.Config(model="", target="", method="lora", seq_len=16, batch_size=8, **only)
    skeleton = eqx.filter_eval_shape(make_transformer(num_layers=3, **model), KEY)
    planned_job = command.make_job(config, skeleton, target)
    useful = planned_job.training.flops_per_token
    assert traced_flops(planned_job) == pytest.approx(useful * 8 * 16)
    assert useful < 0.85 * transformer.num_flops_per_token(sizes, 16)


def test_a_token_uses_the_adapters_of_its_own_experts():
    config = small_config(mlp="swiglu", **{"experts.num_experts": 4, "experts.per_token": 2})

    def per_token(*targets):
        adapters = zoo.lora.Config(rank=2, targets=("blocks.attention.*", *targets))
        make = lambda key: zoo.lora.adapt(
            transformer.Transformer(config, key=key), adapters, key=key
        )
        return flops.per_unit(eqx.filter_eval_shape(make, KEY), 16)

    one = 2 * (config.d_model + config.hidden_size)
    assert per_token("blocks.mlp.w_up") - per_token() == 6 * config.num_layers * 2 * one
    assert flops.per_unit(zoo.mlp.MLP(zoo.mlp.Config(in_size=4, out_size=2), key=KEY), 16) is None
