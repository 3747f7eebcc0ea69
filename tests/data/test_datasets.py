"""Datasets of a user's own, any object with the members of `zoo.Dataset`; orders that are computed.

A permutation has every index once, all orders are alike likely, and they are equal everywhere.
"""

import collections
import math

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
from zoo.data.datasets import LARGEST, Permutation, hashed_integer
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


# --- Permutations ------------------------------------------------------------------------------

# Of the first version: a run that resumes goes on in the order that it began in.
TEN = [0, 8, 5, 6, 4, 1, 2, 9, 3, 7]
ENDS = [44008316860, 213710310429, 456159666039]
KEYS = [(seed, epoch, "rows") for seed in (0, 1) for epoch in (0, 1, 2)]


@pytest.mark.parametrize("size", [*range(1, 70), 4096, 4097, 10**5 + 3])
def test_every_index_once(size):
    image = Permutation(size, (size, "rows"))[np.arange(size)]
    assert image.dtype == np.int64
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


@pytest.mark.slow
@pytest.mark.parametrize("size", [10**6, 2**20, 2**20 + 1, 3162 * 3162, 10**7 - 1, 10**7])
def test_every_index_once_of_many(size):
    for key in KEYS[:2]:
        counts = np.bincount(Permutation(size, key)[np.arange(size)], minlength=size)
        assert len(counts) == size
        assert (counts == 1).all()


@pytest.mark.parametrize("size", [10**12, 10**12 + 39, 2**61 + 1, LARGEST])
def test_spots_of_billions_collide_nowhere(size):
    spots = np.linspace(0, size - 1024, 50_000).astype(np.int64)
    spots = np.unique(np.concatenate([spots, np.arange(50_000), size - 1 - np.arange(50_000)]))
    image = Permutation(size, ("a key",))[spots]
    assert image.min() >= 0
    assert image.max() < size
    assert len(np.unique(image)) == len(spots) > 100_000


def test_one_index_is_that_of_an_array():
    for size in (1, 5, 1000, 10**6, 10**12, LARGEST):
        permutation = Permutation(size, (3, 1))
        chosen = np.unique(np.linspace(0, size - 1, 40).astype(np.int64).clip(0, size - 1))
        one_by_one = [permutation[int(i)] for i in chosen]
        assert all(type(image) is int for image in one_by_one)
        np.testing.assert_array_equal(permutation[chosen], one_by_one)
        assert permutation[chosen[-1]] == one_by_one[-1]  # of numpy's own integers
        assert permutation[chosen[None]].shape == (1, len(chosen))
        assert len(permutation) == size


def test_the_order_is_the_same_on_every_machine_and_version():
    assert Permutation(10, (0, 0, "rows"))[np.arange(10)].tolist() == TEN
    ends = np.array([0, 1, 10**12 - 1])
    assert Permutation(10**12, (7, 2, "rows"))[ends].tolist() == ENDS


def test_keys_give_different_orders():
    size, orders = 1000, []
    for key in [*KEYS, (0, 0, "batches"), (0, "0rows"), (1, 0), (10,), ("1", 0, 0)]:
        orders.append(Permutation(size, key)[np.arange(size)])
    for i, order in enumerate(orders):
        for other in orders[:i]:
            assert (order == other).sum() < 10  # of unrelated orders, one on average


def chi_squared(counts) -> float:
    """Standard deviations by which the counts are less even than chance makes them."""
    counts = np.asarray(counts, np.float64)
    expected, freedom = counts.mean(), counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [512, 4096, 10**5, 10**6, 10**12, LARGEST])
def test_where_indices_go_is_even(size):
    """Blocks of indices to blocks of images, and differences of neighbours: chi-squared."""
    number, blocks = min(size, 20_000), 16
    indices, scale = np.arange(number), -(-size // blocks)
    positions, differences = np.zeros((blocks, blocks)), np.zeros(blocks)
    worst = 0.0
    for key in KEYS:
        image = Permutation(size, key)[indices]
        table = np.zeros((blocks, blocks))
        np.add.at(table, (indices * blocks // number, image // scale), 1)
        # Neighbours in a Feistel network have equal left halves.
        steps = np.bincount((np.diff(image) % size) // scale, minlength=blocks)
        worst = max(worst, chi_squared(table), chi_squared(steps))
        positions, differences = positions + table, differences + steps
    assert worst < 5
    assert chi_squared(positions) < 4
    assert chi_squared(differences) < 4


@pytest.mark.parametrize("size", [3, 4])
def test_all_orders_of_few_are_alike_likely(size):
    orders, drawn = math.factorial(size), 700
    found = collections.Counter(
        tuple(Permutation(size, (key,))[np.arange(size)].tolist()) for key in range(drawn)
    )
    assert len(found) == orders
    assert chi_squared(list(found.values())) < 4


def test_integers_of_a_key_are_even():
    drawn = [hashed_integer(10, (0, epoch)) for epoch in range(2000)]
    assert set(drawn) == set(range(10))
    assert chi_squared(np.bincount(drawn)) < 4
    assert {hashed_integer(1, (epoch,)) for epoch in range(9)} == {0}


@pytest.mark.parametrize("size", [0, -1, LARGEST + 1])
def test_a_size_that_has_no_permutation(size):
    with pytest.raises(ValueError, match=f"size={size}: a permutation has 1 to 2\\^62"):
        Permutation(size, (0,))


@pytest.mark.parametrize("index", [-1, 10, np.array([0, 10]), np.array([3, -1])])
def test_an_index_outside(index):
    with pytest.raises(IndexError, match="of a permutation of 10"):
        Permutation(10, (0,))[index]
