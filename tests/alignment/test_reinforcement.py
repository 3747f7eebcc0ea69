import dataclasses
import json
import random
import re
import signal
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_transformer
from recipe_cases import (
    Recipe,
    assert_same_result,
    losses,
    metrics,
    shared,
    wait_for,
    write_prompts,
)

import zoo
from zoo import lora, reinforcement
from zoo.alignment.answers import half_interval
from zoo.alignment.policy import PolicyLoss
from zoo.alignment.rewards import Reward
from zoo.data.tokenizer import ByteTokenizer
from zoo.nn.stateful import cast
from zoo.runs.metrics import read_metrics
from zoo.runs.processes import RunError

__all__ = ["shared"]
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
OPTIONS = {"group": 4, "max_new_tokens": 6, "stop_tokens": (0,), "key": jax.random.key(3)}


def small(mesh=None):
    model = drawn_transformer(vocab_size=16, num_layers=1, num_heads=4, d_model=16, d_ff=32)
    return model if mesh is None else eqx.filter_shard(model, zoo.sharding.shardings(model, mesh))


# --- Rollouts -----------------------------------------------------------------------------------


def test_what_sampling_says_is_what_training_computes():
    """At the temperature of both: with one of them at another it would be seen in the metric."""
    model, temperature = small(), 0.6
    found = reinforcement.rollouts(model, PROMPTS, temperature=temperature, **OPTIONS)
    assert found.prompts == [ids for ids in PROMPTS for _ in range(4)]
    assert 0 < found.cut.sum() < len(found.cut)
    for answer, cut, log_probs in zip(found.answers, found.cut, found.log_probs, strict=True):
        assert (answer[-1] != 0) == cut
        assert 0 not in answer[:-1]
        assert len(log_probs) == len(answer) <= 6
    rows = reinforcement.rows_of(found, np.ones(12, np.float32), 16)
    batch = {name: jnp.asarray(x) for name, x in rows.items()}

    def gap(temperature):
        loss = PolicyLoss(temperature=temperature)
        total, count = eqx.filter_jit(loss.loss)(model, batch, None)[2]["sampler_gap"]
        return float(total / count)

    assert gap(temperature) < 1e-5
    assert gap(temperature * 1.25) > 0.05


def test_answers_are_the_same_on_a_mesh():
    mesh = zoo.make_mesh("data=2,fsdp=2,tensor=2")
    alone = reinforcement.rollouts(small(), PROMPTS, **OPTIONS)
    spread = reinforcement.rollouts(small(mesh), PROMPTS, **OPTIONS)
    assert spread.answers == alone.answers
    other = reinforcement.rollouts(small(), PROMPTS, **OPTIONS | {"key": jax.random.key(4)})
    assert other.answers != alone.answers
    with pytest.raises(ValueError, match="temperature=0"):
        reinforcement.rollouts(small(), PROMPTS, temperature=0.0, **OPTIONS)


# --- A run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reinforcement")
    sizes = {"vocab_size": 320, "d_model": 32, "num_layers": 1, "num_heads": 2, "mlp": "gelu"}
    base = drawn_transformer(**sizes, **{"attention.head_dim": 16})
    zoo.save(folder / "base", base, tokenizer=ByteTokenizer())
    write_prompts(folder / "prompts.jsonl")
    return folder


def config(folder, run_dir, reward="letters", **fields):
    data = reinforcement.Data(
        files=str(folder / "prompts.jsonl"), batch_size=2, max_prompt_tokens=16
    )
    data = dataclasses.replace(data, **fields.pop("data", {}))
    given = {
        "reward": reward and f"tests.reward_cases:{reward}",
        "model": str(folder / "base"),
        "steps": 2,
        "group_size": 4,
        "max_new_tokens": 4,
        "eval_samples": 2,
        "precision": "fp32",
        "log_every": 1,
        "compilation_cache": None,
        "reward_workers": 1,
    }
    return reinforcement.Config(run_dir=run_dir, data=data, **given | fields)


def train(*arguments, **fields):
    with zoo.Run(config(*arguments, **fields)) as run:
        return reinforcement.train(run)


def parameters(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))


def test_no_reward_changes_nothing(folder, tmp_path):
    found = train(folder, tmp_path / "run", "nothing", method="lora", updates=2)
    assert found["eval_reward"] == 0
    before, after = zoo.load(folder / "base"), zoo.load(tmp_path / "run" / "model")
    assert all((x == y).all() for x, y in zip(parameters(before), parameters(after), strict=True))
    lines = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert [line["groups_without_spread"] for line in lines] == [1.0, 1.0]
    assert [line["grad_norm"] for line in lines] == [0.0, 0.0]
    speeds = ("rollout_tokens_per_second", "update_tokens_per_second", "rewards_per_second")
    whole = read_metrics(tmp_path / "run" / "metrics.jsonl")
    found = [line[name] for line in whole if "loss" in line for name in speeds]
    assert len(found) == 6
    assert min(found) > 0


def test_rewards_are_learnt_from(folder, tmp_path, capsys):
    """A bandit: a letter among 320 ids, which is drawn nearly always once it is rewarded."""
    optimizer = zoo.finetuning.Optimizer(learning_rate=0.02)
    fields = {"steps": 40, "group_size": 16, "max_new_tokens": 1, "eval_every": 100}
    found = train(
        folder, tmp_path / "run", "letters", optimizer=optimizer, solved=0.1, eval_samples=8,
        **fields,
    )  # fmt: skip
    first = metrics(tmp_path / "run")[0]
    assert first["pass@1"] < 0.5 < 0.9 < found["pass@1"] <= found["pass@8"]
    samples = [json.loads(x) for x in (tmp_path / "run" / "samples.jsonl").open()]
    assert [x["step"] for x in samples] == [*range(1, 41)]
    assert len(samples[0]["rewards"]) == 32
    shown = [float(x) for x in re.findall(r" → (\S+)(?:\n|$)", samples[0]["text"])]
    assert shown == [sum(parts.values()) for parts, _ in samples[0]["rewards"][:16]]
    page = (tmp_path / "run" / "samples.html").read_text()
    assert re.findall(r"step (\d+)<", page) == [str(step) for step in range(40, 0, -1)]
    output = capsys.readouterr().out
    assert "held out" in output
    assert "pass@8" in output


def test_failures_are_counted_and_said_once(folder, tmp_path, capsys, monkeypatch):
    keys, plain = [], reinforcement.rollouts

    def remember(*arguments, **options):
        keys.append(jax.random.key_data(options["key"]).tolist())
        return plain(*arguments, **options)

    monkeypatch.setattr("zoo.alignment.answers.rollouts", remember)
    fields = {"reward_on_error": -1.0, "reward_seconds": 5.0}
    train(folder, tmp_path / "run", "wants", **fields)
    lines = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert [line["reward_failures"] for line in lines] == [8.0, 8.0]
    assert [line["reward"] for line in lines] == [-1.0, -1.0]
    samples = [json.loads(x) for x in (tmp_path / "run" / "samples.jsonl").open()]
    assert samples[0]["answers"] != samples[1]["answers"]
    assert len({line["text"] for line in samples}) == 2  # other prompts
    assert len({*map(tuple, keys)}) == 3  # of two steps, and one of both evaluations
    output = capsys.readouterr().out
    assert output.count("rewards by tests.reward_cases:wants failed, the first one: KeyError") == 1


def test_cut_answers_can_be_left_out(folder, tmp_path):
    train(folder, tmp_path / "run", mask_cut=True, max_new_tokens=1, steps=1)
    [line] = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert line["cut"] == 1
    assert line["tokens"] == 0
    assert line["loss"] == line["grad_norm"] == 0


def test_bad_fields_are_refused(folder, tmp_path):
    for fields, match in (
        ({"group_size": 1}, "group_size=1"),
        ({"temperature": 0.0}, r"temperature=0\.0"),
        ({"updates": 0}, "updates=0"),
        ({"label": "want"}, "label='want'"),
        ({"policy": reinforcement.PolicyConfig(kl=0.1)}, r"policy\.kl=0\.1"),
        ({"data": {"held_out": 0.0}}, r"data\.held_out=0"),
    ):
        with pytest.raises(ValueError, match=match):
            config(folder, tmp_path / "run", **fields)


def test_bad_data_are_refused_before_any_compute(folder, tmp_path):
    for fields, match in (
        ({"data": {"max_prompt_tokens": 3}}, r"prompts.jsonl, line \d+: a prompt of .*=3"),
        ({"data": {"prompt": "question"}}, r"prompts.jsonl, line 1: .*'question'.* --data.prompt"),
        ({"data": {"held_out": 1e-9}}, "no prompt to hold out"),
        ({"reward": ""}, r"reward=''"),
        ({"reward": "none_such"}, "none_such"),
        ({"mesh": "data=3"}, "batch_size"),
    ):
        with pytest.raises((ValueError, RunError), match=match):
            train(folder, tmp_path / "run", **fields)
    assert not (tmp_path / "run" / "checkpoints" / "2").exists()


def test_rewards_are_written_down_before_they_are_used(folder, tmp_path, monkeypatch):
    """A second start at the same step reads what the first had, if the answers are the same."""
    with zoo.Run(config(folder, tmp_path / "run")) as run:
        answers = reinforcement.Answers(run, ByteTokenizer(), (0,))
        items = [("p", "a", {"want": "a"}), ("p", "b", {"want": "a"})]
        others = [("p", "a", {"want": "a"}), ("p", "c", {"want": "a"})]
        with answers.open():
            first = answers.rewards(7, items)
        answers = reinforcement.Answers(run, ByteTokenizer(), (0,))
        with answers.open():
            monkeypatch.setattr(answers, "_rewards", lambda items: [Reward({"": 9.0})] * 2)
            assert answers.rewards(7, items) == first
            assert answers.rewards(7, others) == [Reward({"": 9.0})] * 2
            assert answers.rewards(8, items) == [Reward({"": 9.0})] * 2
    lines = [json.loads(x) for x in (tmp_path / "run" / "samples.jsonl").open()]
    assert [line["step"] for line in lines] == [7, 7, 8]


def test_a_plan_counts_the_tokens_of_all_answers(folder, tmp_path, capsys):
    """Of two prompts with four answers each, in rows of 32."""
    with pytest.raises(SystemExit):
        train(folder, tmp_path / "run", plan="cpu:1")
    assert " 256 tokens per step" in capsys.readouterr().out


def test_puzzles_are_there_without_files(folder, tmp_path):
    """And their reward, by which the evaluation has intervals."""
    data = {"files": "", "batch_size": 4, "max_prompt_tokens": 28}
    fields = {"steps": 1, "eval_batches": 1, "final_eval_batches": 2}
    found = train(folder, tmp_path / "run", "", data=data, **fields)
    assert {"pass@1", "pass@2", "pass@1_interval", "eval_answer_tokens_interval"} <= found.keys()
    [line] = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert {"reward/sum", "reward/countdown", "reward/brackets"} & line.keys()
    with pytest.raises(ValueError, match="reward='':"):
        train(folder, tmp_path / "none", "")


def test_intervals_are_those_of_a_bootstrap():
    right = np.array([1.0] * 25 + [0.0] * 75)
    of_theory = 1.96 * np.sqrt(0.25 * 0.75 / 100)
    assert half_interval(right) == pytest.approx(of_theory, rel=0.1)
    assert half_interval(np.ones(9)) == 0


@pytest.mark.slow
def test_no_base_is_in_memory_twice(tmp_path, monkeypatch):
    """While answers are drawn there are an int4 base, adapters, and these in bf16 once more."""
    write_prompts(tmp_path / "prompts.jsonl")
    sizes = {"vocab_size": 320, "d_model": 256, "num_heads": 4, "d_ff": 704}
    model = drawn_transformer(**sizes, **{"attention.head_dim": 64})
    zoo.save(tmp_path / "base", cast(model, jnp.bfloat16), tokenizer=ByteTokenizer())
    held, plain = [], reinforcement.rollouts
    live = lambda: sum(x.nbytes for x in jax.live_arrays())

    def measure(*arguments, **options):
        held.append(live() - before)
        return plain(*arguments, **options)

    monkeypatch.setattr("zoo.alignment.answers.rollouts", measure)
    before = live()
    train(tmp_path, tmp_path / "run", method="lora", base="int4", precision="bf16")
    base = zoo.load(tmp_path / "base", quantize="int4")
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))
    adapters = size(lora.adapt(base, lora.Config(), key=jax.random.key(0))) - size(base)
    wanted = size(base) + 3.5 * adapters  # weights and two moments, and the cast weights
    assert size(base) > 2 * adapters
    assert len(held) == 4
    assert max(held[:3]) < 1.01 * wanted
    assert min(held) > 0.99 * wanted
    assert held[3] < 1.01 * wanted + 3.1 * adapters  # beside a checkpoint, which copies those


# --- Runs in processes of their own -------------------------------------------------------------

MORE = ("--steps=24", "--checkpoint-every=4", "--eval-every=6", "--precision=fp32", "--updates=2")


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_ends_the_same(shared, tmp_path):
    """Within rollouts, rewards and updates, which take most of its time."""
    recipe, choose = Recipe("reinforce", shared), random.Random(0)
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    recipe.run(straight, *MORE)
    samples = run_dir / "samples.jsonl"
    count = lambda: samples.read_bytes().count(b"\n") if samples.exists() else 0
    killed = 0
    for _ in range(3):
        process, before = recipe.start(run_dir, *MORE), count()
        wait_for(lambda: count() > before, process)  # noqa: B023
        time.sleep(choose.uniform(0, 0.1))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed >= 2
    recipe.run(run_dir, *MORE)
    assert_same_result(run_dir, straight, step=24)
    assert samples.read_bytes() == (straight / "samples.jsonl").read_bytes()


@pytest.mark.slow
def test_a_mesh_gives_the_same_run(shared, tmp_path):
    recipe, alone, mesh = Recipe("reinforce", shared), tmp_path / "alone", tmp_path / "mesh"
    more = ("--steps=6", "--precision=fp32", "--updates=2")
    recipe.run(alone, *more)
    recipe.run(mesh, *more, "--mesh=data=2,fsdp=2,tensor=2", devices=8)
    assert losses(mesh) == pytest.approx(losses(alone), rel=1e-4, abs=1e-6)
    assert max(map(abs, losses(alone).values())) > 1e-3
    assert (mesh / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()


@pytest.mark.slow
def test_adapters_over_int4_with_a_divergence(shared, tmp_path):
    flags = ("--method=lora", "--base=int4", "--policy.kl=0.1", "--steps=6")
    Recipe("reinforce", shared).run(tmp_path / "run", *flags, "--advantage=leave_one_out")
    lines = [line for line in metrics(tmp_path / "run") if "kl" in line]
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert abs(lines[-1]["kl"]) > 1e-6
    assert all(line["ratio_max"] == 1.0 for line in lines)
    assert (tmp_path / "run" / "adapters").is_dir()
