import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, covering, drawn_transformer

import zoo
from zoo.alignment.answers import Rollouts, rows_of
from zoo.alignment.policy import Config, PolicyLoss, advantages
from zoo.training import losses
from zoo.wrappers import lora

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "policy.npz")


def test_advantages():
    rewards = np.array([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    apart = rewards - rewards.mean(1, keepdims=True)
    np.testing.assert_allclose(advantages(rewards, "group_mean"), apart, rtol=1e-6)
    std = np.sqrt((apart[0] ** 2).sum() / 3)  # unbiased
    np.testing.assert_allclose(advantages(rewards)[0], apart[0] / (std + 1e-4), rtol=1e-6)
    others = [(rewards[0].sum() - r) / 3 for r in rewards[0]]
    np.testing.assert_allclose(advantages(rewards, "leave_one_out")[0], rewards[0] - others)
    for kind in ("group", "group_mean", "leave_one_out"):
        assert not advantages(rewards, kind)[1].any()  # no spread
    with pytest.raises(ValueError, match="group_size=1"):
        advantages(rewards[:, :1])


def batch_of_golden(**more):
    return {
        "weights": jnp.asarray(GOLDEN["mask"], jnp.float32),
        "advantages": jnp.asarray(GOLDEN["advantages"], jnp.float32),
        "rescored": jnp.asarray(GOLDEN["rescored"], jnp.float32),
        "drawn": jnp.asarray(GOLDEN["rescored"], jnp.float32),
    } | more


def loss_and_gradient(loss, batch, reference=None):
    """The mean loss by the log-probabilities of the golden file, and its gradient by them."""
    log_probs = jnp.asarray(GOLDEN["log_probs"], jnp.float32)
    by_tokens = loss.config.normalize == "tokens"
    count = batch["weights"].sum() if by_tokens else len(log_probs)
    total = lambda x: loss._sums(x, reference, batch)[0] / count
    return jax.value_and_grad(total)(jnp.where(batch["weights"] > 0, log_probs, 0.0))


CLIPS = {"symmetric": (0.2, 0.2), "higher": (0.2, 0.28)}


@pytest.mark.parametrize(
    ("kind", "clip", "kl", "on_policy"),
    covering(["grpo", "dapo"], [*CLIPS], [0.0, 0.1], [False, True]),
)
def test_losses_are_those_of_trl(kind, clip, kl, on_policy):
    low, high = CLIPS[clip]
    normalize = "answers" if kind == "grpo" else "tokens"
    config = Config(clip_low=low, clip_high=high, normalize=normalize, kl=kl)
    reference = jnp.asarray(GOLDEN["reference"], jnp.float32) if kl else None
    found = loss_and_gradient(PolicyLoss(config, on_policy=on_policy), batch_of_golden(), reference)
    name = f"{kind} {clip} {kl}{' on policy' * on_policy}"
    np.testing.assert_allclose(found[0], GOLDEN[f"{name} loss"], rtol=1e-5)
    gradient = GOLDEN[f"{name} gradient"]
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(found[1], gradient, rtol=2e-5, atol=1e-7)
    ratios, gains = np.exp(GOLDEN["log_probs"] - GOLDEN["rescored"]), GOLDEN["advantages"][:, None]
    is_out = np.where(gains > 0, ratios > 1 + high, ratios < 1 - low)[GOLDEN["mask"] > 0]
    assert 0 < is_out.sum() < is_out.size
    log_probs = jnp.asarray(GOLDEN["log_probs"] * GOLDEN["mask"], jnp.float32)
    loss = PolicyLoss(config, on_policy=on_policy)
    clipped, count = loss._sums(log_probs, reference, batch_of_golden())[1]["clipped"]
    assert float(clipped / count) == pytest.approx(0 if on_policy else is_out.mean())


@pytest.mark.parametrize("clip", CLIPS)
def test_losses_of_whole_answers_are_those_of_trl(clip):
    low, high = CLIPS[clip]
    config = Config(ratio="sequence", normalize="answers", clip_low=low, clip_high=high)
    found = loss_and_gradient(PolicyLoss(config, on_policy=False), batch_of_golden())
    np.testing.assert_allclose(found[0], GOLDEN[f"rloo {clip} loss"], rtol=1e-5)
    np.testing.assert_allclose(found[1], GOLDEN[f"rloo {clip} gradient"], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_truncated_weights_by_hand(ratio):
    """Neither trainer has them without another program that samples."""
    drawn = GOLDEN["rescored"] + np.random.default_rng(1).normal(size=GOLDEN["rescored"].shape)
    config = Config(ratio=ratio, normalize="answers", clip_low=None, clip_high=None, truncate=1.5)
    batch = batch_of_golden(drawn=jnp.asarray(drawn, jnp.float32))
    found, _ = loss_and_gradient(PolicyLoss(config, on_policy=False), batch)
    mask, gains = GOLDEN["mask"], GOLDEN["advantages"]
    log_ratio = (GOLDEN["log_probs"] - GOLDEN["rescored"]) * mask
    gap = (GOLDEN["rescored"] - drawn) * mask
    if ratio == "token":
        terms = -np.exp(log_ratio) * gains[:, None] * np.minimum(np.exp(gap), 1.5) * mask
        wanted = (terms.sum(1) / mask.sum(1)).mean()
    else:
        terms = -np.exp(log_ratio.sum(1)) * gains * np.minimum(np.exp(gap.sum(1)), 1.5)
        wanted = terms.mean()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


# --- On a model -----------------------------------------------------------------------------------


def model_and_batch():
    """Answers of several lengths to prompts of several lengths, drawn by nothing."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 31, n).tolist() for n in (3, 5, 2, 4)]
    answers = [rng.integers(0, 31, n).tolist() for n in (4, 1, 6, 3)]
    log_probs = [(-rng.exponential(3.0, len(x))).tolist() for x in answers]
    found = Rollouts(prompts, answers, log_probs, np.zeros(4, bool))
    model = drawn_transformer(vocab_size=31, num_layers=1, num_heads=2, d_model=16, d_ff=32)
    return model, on_device(rows_of(found, rng.normal(size=4).astype(np.float32), 12)), found


def on_device(batch):
    return {name: jnp.asarray(x) for name, x in batch.items()}


def test_rows_have_an_answer_behind_its_prompt():
    _, batch, found = model_and_batch()
    for row, (prompt, answer) in enumerate(zip(found.prompts, found.answers, strict=True)):
        counted = batch["weights"][row] > 0
        assert batch["targets"][row][counted].tolist() == answer
        assert batch["tokens"][row][: len(prompt)].tolist() == prompt
        np.testing.assert_allclose(batch["drawn"][row][counted], found.log_probs[row], rtol=1e-6)
        assert not batch["drawn"][row][~counted].any()
        assert batch["segment_ids"][row].sum() == len(prompt) + len(answer) - 1


def test_the_loss_is_the_policy_gradient():
    """By the log-softmax of the logits at the temperature; and the metrics."""
    model, batch, _ = model_and_batch()
    loss = PolicyLoss(Config(), temperature=0.7)

    def by_hand(model):
        logits = model(batch["tokens"], segment_ids=batch["segment_ids"]) / 0.7
        logs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(logs, batch["targets"][..., None], 2)[..., 0]
        weights = jnp.asarray(batch["weights"])
        gain = batch["advantages"][:, None] * chosen * weights
        return -gain.sum() / weights.sum(), (logs, chosen)

    def mean(model):
        total, weight, metrics = loss.loss(model, batch, None)
        return total / weight, metrics

    gradient = lambda function: eqx.filter_jit(eqx.filter_grad(function, has_aux=True))(model)
    (found, metrics), (wanted, (logs, chosen)) = gradient(mean), gradient(by_hand)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted)) > 1e-3
    assert_trees_close(found, wanted, rtol=1e-5)
    share = lambda name: float(metrics[name][0] / metrics[name][1])
    counted = batch["weights"] > 0
    entropy = -(jnp.exp(logs) * logs).sum(-1)
    assert share("entropy") == pytest.approx(float(entropy[counted].mean()), rel=1e-5)
    gap = jnp.abs(chosen - batch["drawn"])[counted].mean()
    assert share("sampler_gap") == pytest.approx(float(gap), rel=1e-5)
    assert share("ratio_max") == 1.0
    assert share("clipped") == 0


def test_large_logits_are_cut_along_time(monkeypatch):
    model, batch, _ = model_and_batch()
    loss = PolicyLoss(Config(normalize="answers"), on_policy=False)
    batch["rescored"] = batch["drawn"]

    def gradient():
        mean = lambda model: loss.loss(model, batch, None)[0]
        return eqx.filter_jit(eqx.filter_value_and_grad(mean))(model)

    whole = gradient()
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 4 * 31 * 4)
    assert_trees_close(gradient(), whole, rtol=1e-5)


def test_prompt_padding_and_masked_rows_have_no_gradient():
    """By the logits of each position, which count where an answer's tokens are predicted."""
    model, batch, _ = model_and_batch()
    batch["weights"] = batch["weights"].at[1].set(0)
    logits = eqx.filter_jit(model)(batch["tokens"])

    class Given(eqx.Module):
        logits: jax.Array

        def __call__(self, tokens, *, segment_ids, positions, key):
            return self.logits

    for normalize in ("tokens", "answers"):
        loss = PolicyLoss(Config(normalize=normalize)).loss
        total = lambda model, loss=loss: loss(model, batch, None)[0]
        gradient = eqx.filter_jit(eqx.filter_grad(total))(Given(logits)).logits
        has_gradient = (np.asarray(gradient) != 0).any(-1)
        np.testing.assert_array_equal(has_gradient, batch["weights"] > 0)
        assert 0 < has_gradient.sum() < has_gradient.size


@pytest.mark.parametrize("on_policy", [True, False])
def test_log_probabilities_stay_in_fp32_where_a_step_casts(on_policy: bool):
    """For a model that is not the zoo's: in bf16 this difference would be lost."""

    class Table(eqx.Module):
        logits: jax.Array

        def __call__(self, tokens, *, segment_ids, positions, key):
            return self.logits[tokens]

    _, batch, _ = model_and_batch()
    batch["drawn"] = jnp.full_like(batch["drawn"], -3.0)
    batch |= {} if on_policy else {"rescored": batch["drawn"] + 2**-10}
    step = zoo.make_eval_step(PolicyLoss(on_policy=on_policy).loss, precision="bf16")
    _, metrics = step(Table(jnp.zeros((31, 31))), batch)
    gap = float(metrics["sampler_gap"][0] / metrics["sampler_gap"][1])
    expected = np.log(31) - 3 if on_policy else 2**-10
    assert gap == pytest.approx(expected, rel=1e-4)


def test_the_reference_is_the_model_under_the_adapters():
    model, batch, _ = model_and_batch()
    config = Config(kl=0.5)
    with pytest.raises(ValueError, match=r"policy\.kl"):
        PolicyLoss(config).loss(model, batch, None)
    adapted = lora.adapt(model, lora.Config(rank=2), key=jax.random.key(1))
    with_kl, without = (
        eqx.filter_jit(PolicyLoss(dataclasses.replace(config, kl=kl)).loss) for kl in (0.5, 0.0)
    )
    total, _, metrics = with_kl(adapted, batch, None)
    plain, *_ = without(adapted, batch, None)
    assert float(metrics["kl"][0]) == pytest.approx(0, abs=1e-5)  # adapters begin at zero
    assert float(total) == pytest.approx(float(plain), rel=1e-5)
    chosen = lora.trainable(adapted)
    trained, rest = eqx.partition(adapted, chosen)
    moved = eqx.combine(jax.tree.map(lambda x: x + 0.3, trained), rest)
    total, _, metrics = with_kl(moved, batch, None)
    plain, *_ = without(moved, batch, None)
    assert float(metrics["kl"][0]) > 0.1
    assert float(total) == pytest.approx(float(plain + 0.5 * metrics["kl"][0]), rel=1e-5)
    logs = [
        jax.nn.log_softmax(eqx.filter_jit(x)(batch["tokens"], segment_ids=batch["segment_ids"]))
        for x in (moved, model)
    ]
    mine, of_base = (jnp.take_along_axis(x, batch["targets"][..., None], 2)[..., 0] for x in logs)
    apart = of_base - mine
    kl = ((jnp.exp(apart) - apart - 1) * batch["weights"]).sum()
    assert float(metrics["kl"][0]) == pytest.approx(float(kl), rel=1e-4)


def test_bad_fields_are_refused():
    for fields, match in (
        ({"clip_low": 2.0}, r"policy\.clip_low=2"),
        ({"clip_high": 0.0}, r"policy\.clip_high=0"),
        ({"kl": -1.0}, r"policy\.kl=-1"),
        ({"ratio": "sequence"}, r"policy\.normalize"),
        ({"ratio": "sequence", "normalize": "answers", "kl": 0.1}, r"policy\.kl_in"),
    ):
        with pytest.raises(ValueError, match=match):
            Config(**fields)
