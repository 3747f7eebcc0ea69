"""Runs of several processes on this machine, which find each other over the loopback."""

import json
import signal

import numpy as np
import pytest
from helpers import drawn_transformer
from recipe_cases import (
    Program,
    Recipe,
    assert_same_result,
    finish,
    losses,
    metrics,
    shared,
    wait_for,
)
from stores import free_port

import zoo
from zoo.data.prepared.prepare import prepare

__all__ = ["shared"]

# With this schedule a run of more steps begins as one of fewer.
FLAGS = (
    "--precision=fp32",
    "--checkpoint-every=6",
    "--optimizer.schedule=constant",
    "--optimizer.warmup-steps=0",
)
MASKED = (
    "--objective=masked",
    "--model.no-causal",
    "--data.tokenizer=bpe",
    "--data.vocab-size=300",
)
BEST = ("--eval-every=6", "--average=0.9", "--keep-best=average/eval_loss", "--patience=9")
MESHES = {"data=2,fsdp=2": (*BEST, "--sample-every=6"), "fsdp=2,context=2": MASKED}


def start_processes(recipe: Recipe, run_dir, *flags, own=((), ()), devices=2) -> list[Program]:
    """Processes of one run, each with flags of its own."""
    address = f"127.0.0.1:{free_port()}"
    return [
        recipe.start(
            run_dir,
            *FLAGS,
            "--distributed",
            *flags,
            *more,
            devices=devices,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES=str(len(own)),
            JAX_PROCESS_ID=str(i),
        )
        for i, more in enumerate(own)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_two_process_run_resumes_on_one(mesh, shared, tmp_path):
    """Of next tokens with an average, and of hidden ones, which have to be the same on both."""
    recipe, run_dir, more = Recipe("lm", shared), tmp_path / "run", MESHES[mesh]
    recipe.run(tmp_path / "alone", *FLAGS, *more, "--steps=18")
    flags = (f"--mesh={mesh}", "--steps=12", "--norms-every=4", "--track=tensorboard", *more)
    first, second = (finish(p) for p in start_processes(recipe, run_dir, *flags))
    assert "step 12: eval_loss" in first
    assert ("fillings.txt" if more is MASKED else "--- a sample of step") in first
    assert "Traceback" not in second
    assert "eval_loss" not in second  # one of them speaks
    assert "a sample" not in second
    assert (run_dir / "model" / "model.safetensors").is_file()

    output = recipe.run(run_dir, *FLAGS, *more, "--steps=18")
    assert f"resumed {run_dir} at step 12" in output
    assert list(losses(run_dir)) == list(range(1, 19))
    assert losses(run_dir) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    if more is not MASKED:
        found, wanted = (
            [line["average/eval_loss"] for line in metrics(folder) if "eval_loss" in line]
            for folder in (run_dir, tmp_path / "alone")
        )
        assert found == pytest.approx(wanted, rel=1e-5)
        assert (run_dir / "best" / "model.safetensors").is_file()


@pytest.mark.slow
def test_two_processes_train_a_mixture_bit_for_bit_as_one(shared, tmp_path):
    """Of a prepared source and of text, with a stage; and after a kill behind its beginning."""
    texts = [f"def f{i}(x): return {i} * x" for i in range(99)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "lines.jsonl").write_text(lines)
    prepare(str(tmp_path / "lines.jsonl"), tmp_path / "prepared", workers=1)
    table = tmp_path / "mixture.toml"
    table.write_text(
        f'[sources.code]\nfiles = "{tmp_path}/prepared"\nweight = 0.7\n'
        f'[sources.docs]\nfiles = "{shared}/corpus/*.txt"\nweight = 0.3\n'
        "[[stages]]\nstart = 20\nweights = {code = 0.2, docs = 0.8}\n"
    )
    recipe, flags = Recipe("lm", shared), ("--mesh=fsdp=2", f"--data.files={table}")
    one, two, killed = (tmp_path / name for name in ("one", "two", "killed"))
    recipe.run(one, *FLAGS, *flags, devices=2)
    for process in start_processes(recipe, two, *flags, devices=1):
        finish(process)
    assert_same_result(two, one)
    assert {"code/loss", "docs/loss", "code/epoch"} < metrics(two)[0].keys()
    processes = start_processes(recipe, killed, *flags, devices=1)
    log = killed / "metrics.jsonl"
    wait_for(lambda: log.exists() and b'"step": 22,' in log.read_bytes(), processes[0])
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()
    first, _ = (finish(process) for process in start_processes(recipe, killed, *flags, devices=1))
    assert f"resumed {killed} at step 18" in first
    assert_same_result(killed, one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune", "finetune on preferences"])
def test_two_processes_finetune_bit_for_bit_as_one(name, shared, tmp_path):
    """Adapters; and a whole model on preferences, whose reference both processes ask."""
    recipe, one, two = Recipe(name, shared), tmp_path / "one", tmp_path / "two"
    recipe.run(one, *FLAGS, "--mesh=fsdp=2", devices=2)
    processes = start_processes(recipe, two, "--mesh=fsdp=2", devices=1)
    said, other = (finish(process) for process in processes)
    assert_same_result(two, one)
    assert "--- a sample after ---" in said
    assert "a sample" not in other
    if name == "finetune":
        return
    first, second = (np.load(x / "reference" / "log_probabilities.npz") for x in (one, two))
    assert len(first["train"]) > 40
    for name in ("train", "held_out"):
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.slow
def test_two_processes_learn_from_rewards_as_one(shared, tmp_path):
    """Both draw all answers; process 0 has them rewarded, and tells the other."""
    recipe, one, two = Recipe("reinforce", shared), tmp_path / "one", tmp_path / "two"
    flags = ("--mesh=fsdp=2", "--steps=6")
    recipe.run(one, *FLAGS, *flags, devices=2)
    first, second = (finish(p) for p in start_processes(recipe, two, *flags, devices=1))
    assert (two / "samples.jsonl").read_bytes() == (one / "samples.jsonl").read_bytes()
    assert metrics(two) == metrics(one)
    assert "prompts to train on" in first
    assert "prompts to train on" not in second


@pytest.mark.slow
def test_one_signal_interrupts_both_evaluations(shared, tmp_path):
    recipe, run_dir = Recipe("lm", shared), tmp_path / "run"
    text = ("--data.files=", "--eval-batches=1000000")  # all that is held out of the library
    flags = ("--steps=40", "--checkpoint-every=1000", "--eval-every=5", *text)
    processes = start_processes(recipe, run_dir, "--mesh=data=2,fsdp=2", *flags)
    log = run_dir / "metrics.jsonl"
    wait_for(lambda: log.exists() and b'"step": 5,' in log.read_bytes(), processes[0])
    processes[1].send_signal(signal.SIGTERM)
    first, _ = [finish(process, 143) for process in processes]
    assert f"SIGTERM: saved step 5 in {run_dir}" in first
    assert [set(line) & {"loss", "eval_loss"} for line in metrics(run_dir)] == [{"loss"}] * 5

    recipe.run(run_dir, *FLAGS, "--steps=5", "--data.files=")
    assert "eval_loss" in metrics(run_dir)[-1]
    assert metrics(run_dir)[-1]["step"] == 5


LOAD_AND_SAVE = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
import zoo
from zoo.common import checksums
from zoo.publishing import tensors
checksums.PART_BYTES = tensors.BLOCK_BYTES = 1000
folder = Path(sys.argv[3])
for format in ("zoo", "hf"):
    one = jax.tree.leaves(zoo.load(folder / format))
    for spec in ("fsdp=4", "data=2,tensor=2"):
        model = zoo.load(folder / format, mesh=zoo.make_mesh(spec))
        split = 0
        for found, want in zip(jax.tree.leaves(model), one, strict=True):
            split += not found.is_fully_replicated
            for shard in found.addressable_shards:
                assert np.array_equal(shard.data, np.asarray(want)[shard.index])
        assert split > 5
        zoo.save(folder / f"{format} {spec}", model, format=format)
print("equal")
"""


@pytest.mark.slow
def test_two_processes_load_and_save_what_one_does(tmp_path):
    model = drawn_transformer(num_layers=2, num_heads=8, d_model=32, d_ff=64)
    for format in ("zoo", "hf"):
        zoo.save(tmp_path / format, model, format=format)
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "program.py").write_text(LOAD_AND_SAVE)
    arguments = [tmp_path / "program.py", address]
    processes = [Program([*arguments, str(i), tmp_path], devices=2) for i in range(2)]
    for process in processes:
        assert "equal" in finish(process)
    for format in ("zoo", "hf"):
        want = (tmp_path / format / "model.safetensors").read_bytes()
        saved = [*tmp_path.glob(f"{format} *")]
        assert len(saved) == 2
        for folder in saved:
            assert (folder / "model.safetensors").read_bytes() == want
            zoo.load(folder)  # its checksums too
