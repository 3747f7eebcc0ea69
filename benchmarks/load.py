"""Measure the memory of loading and saving a large model, beside what the devices hold of it.

python -m benchmarks.load --megabytes 1300

Eight virtual devices lie in one process, or in two or four; the model is sharded over all of them.
Counted is anonymous memory (`RssAnon` of Linux): pages of mapped files are the system's to take
back. Folders in the zoo's format and in Hugging Face's.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tyro

from benchmarks.report import Table, provenance, save

DEVICES = 8
FORMATS = ("zoo", "hf")


@dataclass(frozen=True)
class Config:
    """Measure the memory of loading and saving a large model."""

    megabytes: int = 1300
    """Size of the model, at least 320."""
    processes: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes to measure."""
    folder: Path | None = None
    """Where models are written; a temporary folder if not given."""
    results: Path = Path(__file__).parent / "results"
    """Where the tables are saved."""


def main(config: Config) -> None:
    """Measure, print and save the table."""
    table = Table(f"a model of about {config.megabytes:,} MiB on {DEVICES} devices")
    with tempfile.TemporaryDirectory(dir=config.folder) as folder:
        _run(1, Path(folder), config.megabytes, "make")
        for count in config.processes:
            for format in FORMATS:
                found = _run(count, Path(folder), config.megabytes, format)
                worst = {name: max(one[name] for one in found) for name in found[0]}
                table.rows.append({"processes": count, "format": format, **worst})
                print(table.rows[-1], file=sys.stderr, flush=True)
    table.notes.append(
        "MiB of anonymous memory, of the process that has most. held: what its devices hold of the "
        "model; load: the peak while it is loaded, less what is held; save: the peak while it is "
        "saved, less what there was before; kept: what there was more of a second later. Files "
        "were in the page cache."
    )
    table.print()
    command = " ".join(["python -m benchmarks.load", *sys.argv[1:]])
    source = {"date": date.today().isoformat(), "command": command, **provenance()}
    save("load", [table], source, config.results)


def _run(count: int, folder: Path, megabytes: int, task: str) -> list[dict[str, float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // count}",
    }
    command = [sys.executable, "-m", "benchmarks.load", "worker", task, str(folder)]
    numbers = [str(megabytes), str(port), str(count)]
    workers = [
        subprocess.Popen(
            [*command, *numbers, str(number)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for number in range(count)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a worker failed: {outputs}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def worker(task: str, folder: Path, megabytes: int, port: int, count: int, number: int) -> None:
    """One process of a measurement; prints its figures as JSON."""
    import jax

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    if task == "make":
        make(folder, megabytes)
        print("{}")
        return
    import zoo

    mesh = zoo.make_mesh(f"fsdp={DEVICES}")
    zoo.load(folder / f"small-{task}", mesh=mesh)  # what the program itself takes
    model, loading = measured(lambda: zoo.load(folder / task, mesh=mesh))
    shards = [s.data.nbytes for x in jax.tree.leaves(model) for s in x.addressable_shards]
    held = sum(shards) / 2**20
    again = folder / f"again-{task}"
    _, saving = measured(lambda: zoo.save(again, model, format=task))  # type: ignore[arg-type]
    same = (again / "model.safetensors").read_bytes()[-1000:]
    assert same == (folder / task / "model.safetensors").read_bytes()[-1000:]
    jax.block_until_ready(model)
    if count > 1:
        jax.distributed.shutdown()
    if number == 0:
        shutil.rmtree(again)
    found = {"held": held, "load": loading["peak"] - held, "load seconds": loading["seconds"]}
    found |= {"save": saving["peak"], "kept": saving["kept"], "save seconds": saving["seconds"]}
    print(json.dumps(found), flush=True)


def make(folder: Path, megabytes: int) -> None:
    """Models of random numbers: one of a size, and a small one."""
    import equinox as eqx
    import jax
    import numpy as np

    import zoo
    from zoo import transformer

    per_layer = 50_331_648 * 4 / 2**20
    for prefix, layers, size in (("", int(megabytes / per_layer - 2.5), 2048), ("small-", 1, 64)):
        config = transformer.Config(
            vocab_size=16 * size, d_model=size, num_layers=max(1, layers), num_heads=16
        )
        make_model = lambda key: transformer.Transformer(config, key=key)  # noqa: B023, E731
        skeleton = eqx.filter_eval_shape(make_model, jax.random.key(0))
        draw = np.random.default_rng(0).standard_normal
        model = jax.tree.map(lambda x: jax.numpy.asarray(draw(x.shape, x.dtype)), skeleton)  # noqa: B023
        for format in FORMATS:
            zoo.save(folder / f"{prefix}{format}", model, format=format)  # type: ignore[arg-type]


def measured(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """(a result, the seconds that it took, and how many MiB of memory at its peak and after)."""
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    time.sleep(1)
    return result, {"seconds": seconds, "peak": peak - before, "kept": anonymous() - before}


def anonymous() -> float:
    """MiB of this process's memory that no file backs."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
    else:
        main(tyro.cli(Config))
