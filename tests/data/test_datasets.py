"""Datasets: of a user's own, which is any object with the members of `zoo.Dataset`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

import zoo
from zoo import losses
from zoo.data import datasets
from zoo.runs import recorder
from zoo.runs.config import Config


class Endless:
    """A user's own dataset, which subclasses nothing: rows made up on demand, of two lengths."""

    unit = "tokens"
    batch_size = 4
    buckets = (8, 16)
    batches_per_epoch = 3
    fingerprint = "made up"  # without it, some batches would be asked for at the start

    def __init__(self):
        self.asked = []

    def row(self, bucket):
        return {
            "tokens": ((bucket,), np.int32),
            "targets": ((bucket,), np.int32),
            "weights": ((bucket,), np.float32),
        }

    def batch(self, k, rows=None):
        self.asked.append((k, rows.start, rows.stop))
        length = self.buckets[k % 2]
        values = np.random.default_rng(k).integers(0, 16, (self.batch_size, length + 1))
        values = values.astype(np.int32)[rows or slice(None)]
        weights = np.ones((len(values), length), np.float32)
        return {"tokens": values[:, :-1], "targets": values[:, 1:], "weights": weights}


class Bigram(eqx.Module):
    table: Float[Array, "vocab embed"]

    def __init__(self, key):
        self.table = jax.random.normal(key, (16, 16))

    def __call__(self, tokens, *, segment_ids, positions, key):
        return jnp.take(self.table, tokens, axis=0)


def fit_endless(folder, steps):
    config = Config(
        run_dir=folder,
        steps=steps,
        mesh="fsdp=2,tensor=2",
        precision="fp32",
        log_every=2,
        eval_every=4,
        eval_batches=1,
        checkpoint_every=2,
        compilation_cache=None,
    )
    dataset = Endless()
    with zoo.Run(config) as run:
        state, result = zoo.fit(
            run,
            zoo.Training(
                make_model=Bigram,
                loss_fn=losses.next_token,
                optimizer=optax.adam(1e-2),
                data=dataset,
                evaluate=zoo.evaluator(run, losses.next_token, Endless()),
            ),
        )
    return state, result, dataset


def test_a_dataset_of_ones_own_trains_on_a_mesh_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "plot_curves", lambda *paths: None)
    assert isinstance(Endless(), zoo.Dataset)
    whole, result, dataset = fit_endless(tmp_path / "whole", 6)
    assert {k for k, *_ in dataset.asked} == set(range(6))
    assert {tuple(rows) for _, *rows in dataset.asked} == {(0, 2), (2, 4)}
    fit_endless(tmp_path / "parts", 4)
    resumed, again, rest = fit_endless(tmp_path / "parts", 6)
    assert {k for k, *_ in rest.asked} == {4, 5}
    np.testing.assert_array_equal(resumed.model.table, whole.model.table)
    assert again == result


def test_datasets_that_lack_a_member_are_refused(tmp_path):
    class Changing(Endless):
        """Whole where the tests' type checker looks at it, as it does not for a user's run."""

        lacks = ()

        def __getattribute__(self, name):
            if name != "lacks" and name in self.lacks:
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert not isinstance(object(), zoo.Dataset)
    training = zoo.Training(
        make_model=Bigram,
        loss_fn=losses.next_token,
        optimizer=optax.adam(1e-2),
        data=Changing(),
        evaluate=lambda model, whole: {},
    )
    training.data.lacks = ("row", "batch_size")
    message = r"Changing has no batch_size, row: a zoo\.Dataset has unit, b"
    with pytest.raises(TypeError, match=message):
        datasets.check_dataset(training.data)
    with (
        zoo.Run(Config(run_dir=tmp_path / "run", steps=1, compilation_cache=None)) as run,
        pytest.raises(TypeError, match=message),
    ):
        zoo.fit(run, training)
