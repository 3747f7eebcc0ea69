"""Named sets of the compiler's flags: known to the compilers, and given to them."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import optax
import pytest

import zoo
from zoo import losses, transformer
from zoo.planning import targets
from zoo.training import compiled

SIZES = transformer.Config(vocab_size=8, d_model=8, num_layers=1, num_heads=1)
KEY = jax.random.key(0)


def accepts(lowered, options):
    return lowered.compile(compiler_options=options) is not None


def test_xla_knows_the_flags_of_gpus():
    """Its compiler for CPUs reads them too, and does nothing with them."""
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    for given in compiled.FLAG_SETS["gpu"].values():
        assert accepts(lowered, given)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_nothing"):
        accepts(lowered, {"xla_gpu_nothing": True})


def test_libtpu_knows_the_flags_of_tpus():
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    [chip] = targets.parse("v5e:1x1").devices()
    one = jax.sharding.SingleDeviceSharding(chip)
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=one))
    for given in compiled.FLAG_SETS["tpu"].values():
        assert accepts(lowered, given)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_tpu_nothing"):
        accepts(lowered, {"xla_tpu_nothing": True})


def test_sets_have_the_names_that_are_flags_of_a_run():
    assert {name for sets in compiled.FLAG_SETS.values() for name in sets} == {
        name for name in get_args(compiled.Flags) if name != "default"
    }
    assert compiled.flag_sets("cpu") == ["default", "native_bf16"]


def test_a_loop_in_native_bf16_writes_its_part_alone():
    """Else XLA for CPU converts all of an array, and back, at each turn."""
    sizes = dataclasses.replace(SIZES, num_layers=3)
    make, optimizer = lambda key: transformer.Transformer(sizes, key=key), optax.sgd(1.0)
    ones = jnp.ones((2, 6), jnp.int32)
    batch = {"tokens": ones, "targets": ones, "weights": jnp.ones((2, 6))}
    seen, found = {}, {}
    for name in compiled.flag_sets("cpu"):
        state = zoo.init_state(make, optimizer, key=KEY)
        step = zoo.make_train_step(losses.next_token, optimizer, precision="bf16", xla=name)
        seen[name] = float(step(state, batch)[1]["loss"])
        found[name] = "f32[3,2,6,8]" in step.programs[0].as_text()
    assert found == {"default": True, "native_bf16": False}
    assert seen["native_bf16"] == pytest.approx(seen["default"], rel=1e-2)


@pytest.mark.parametrize(
    ("name", "where"), [("overlap", None), ("no_windows", "gpu"), ("overlap", "tpu")]
)
def test_flags_of_another_platform_are_refused(name, where):
    platform = where or "cpu"  # JAX's own here
    with pytest.raises(ValueError, match=rf"xla='{name}'.*{platform}.*'default'"):
        compiled.flag_options(name, where)
    with pytest.raises(ValueError, match=r"xla='overlap'.*cpu"):
        zoo.make_train_step(
            losses.next_token, optax.sgd(1.0), mesh=zoo.make_mesh(""), xla="overlap"
        )


def test_a_step_is_compiled_with_its_flags(monkeypatch):
    """As one that the compiler does not know shows."""
    monkeypatch.setitem(compiled.FLAG_SETS, "cpu", {"overlap": {"xla_unheard_of": True}})
    make = lambda key: transformer.Transformer(SIZES, key=key)
    ones = jnp.ones((2, 8), jnp.int32)
    batch = {"tokens": ones, "targets": ones, "weights": ones.astype(float)}

    def compile_with(xla):
        state = zoo.init_state(make, optax.sgd(1.0), key=KEY, mesh=None)
        zoo.make_train_step(losses.next_token, optax.sgd(1.0), xla=xla).compile(state, batch)

    compile_with("default")
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_unheard_of"):
        compile_with("overlap")
