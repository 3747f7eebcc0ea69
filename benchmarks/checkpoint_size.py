"""Time checkpoints of a large state: the stall, saving, restoring, verifying.

python -m benchmarks.checkpoint_size --megabytes 2048

A state of that size lies on eight virtual devices of one process, and on one device of each of two
and four processes. Beside the zoo: Orbax alone, which verifies nothing; a SHA-256 of all files,
which was the price of verification before chunks had checksums; and `dd` on the same disk.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tyro

from benchmarks.report import Table, provenance, save


@dataclass(frozen=True)
class Config:
    """Time checkpoints of a large state."""

    megabytes: int = 2048
    """Size of the state."""
    processes: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes to measure."""
    rounds: int = 3
    """Repetitions; the tables have medians."""
    folder: Path | None = None
    """Where checkpoints are written; a temporary folder if not given."""
    results: Path = Path(__file__).parent / "results"
    """Where the tables are saved."""


def main(config: Config) -> None:
    """Measure, print and save the table."""
    table = Table(f"checkpoint of {config.megabytes:,} MiB: seconds, medians of {config.rounds}")
    with tempfile.TemporaryDirectory(dir=config.folder) as folder:
        disk = _dd(Path(folder), config.megabytes, config.rounds)
        for count in config.processes:
            table.rows.append(
                {"processes": count, **_measured(config, count, Path(folder)), **disk}
            )
    table.notes.append(
        "stall: until `save` returned; save: until the step was committed; SHA-256: of all files "
        "by one process, as each save and each restore did before; dd: writing with "
        "conv=fsync, and reading from the page cache, which restoring does too"
    )
    table.print()
    command = " ".join(["python -m benchmarks.checkpoint_size", *sys.argv[1:]])
    source = {"date": date.today().isoformat(), "command": command, **provenance()}
    save("checkpoint-size", [table], source, config.results)


def _measured(config: Config, count: int, folder: Path) -> dict[str, float]:
    """The medians of the slowest process in each round."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    devices = 8 if count == 1 else 1
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    arguments = [str(config.megabytes), str(config.rounds), str(folder / str(count)), str(port)]
    command = [sys.executable, "-m", "benchmarks.checkpoint_size", "worker", str(count)]
    workers = [
        subprocess.Popen(
            [*command, str(number), *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )
        for number in range(count)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a worker failed: {outputs}")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    slowest = {
        name: [max(one[name][i] for one in found) for i in range(config.rounds)]
        for name in found[0]
    }
    return {name: statistics.median(times) for name, times in slowest.items()}


def _dd(folder: Path, megabytes: int, rounds: int) -> dict[str, float]:
    path, times = folder / "dd", {"dd write": [], "dd read": []}
    for _ in range(rounds):
        for name, arguments in (
            ("dd write", [f"of={path}", "if=/dev/zero", "conv=fsync"]),
            ("dd read", [f"if={path}", "of=/dev/null"]),
        ):
            begin = time.perf_counter()
            command = ["dd", "bs=1M", f"count={megabytes}", "status=none", *arguments]
            subprocess.run(command, check=True)
            times[name].append(time.perf_counter() - begin)
    path.unlink()
    return {name: statistics.median(each) for name, each in times.items()}


def worker(count: int, number: int, megabytes: int, rounds: int, folder: Path, port: int) -> None:
    """One process of a measurement; prints its seconds as JSON."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    from zoo.base import checksums
    from zoo.runs.checkpoint import Checkpointer

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    base = np.random.default_rng(0).normal(size=(4096, 4096)).astype(np.float32)  # 64 MiB
    state = {
        f"w{i}": jax.make_array_from_callback(base.shape, sharding, lambda index: base[index] + i)  # noqa: B023
        for i in range(max(megabytes // 64, 1))
    }
    jax.block_until_ready(state)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, function: Any) -> Any:
        multihost_utils.sync_global_devices(name)
        begin = time.perf_counter()
        result = jax.block_until_ready(function())
        seconds.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    # Without values: nothing of the state is alive beside what is restored but itself.
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    restore = ocp.args.PyTreeRestore(
        structs, restore_args=ocp.checkpoint_utils.construct_restore_args(structs)
    )
    for _ in range(rounds):
        checkpointer = Checkpointer(folder / "zoo")
        begin = time.perf_counter()
        timed("stall", lambda: checkpointer.save(1, state, {}))  # noqa: B023
        checkpointer.wait()
        seconds.setdefault("save", []).append(time.perf_counter() - begin)
        timed("restore", lambda: checkpointer.restore(structs)[0])  # noqa: B023
        checkpointer.close()
        timed("SHA-256", lambda: number or checksums.of(folder / "zoo") or 0)
        timed("Orbax save", lambda: orbax.save(folder / "orbax", ocp.args.PyTreeSave(state)))
        begin = time.perf_counter()
        orbax.wait_until_finished()
        seconds["Orbax save"][-1] += time.perf_counter() - begin
        timed("Orbax restore", lambda: orbax.restore(folder / "orbax", restore))
        multihost_utils.sync_global_devices("done")
        if number == 0:
            shutil.rmtree(folder)
        multihost_utils.sync_global_devices("removed")
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        numbers = [int(argument) for argument in (*sys.argv[2:6], sys.argv[7])]
        worker(*numbers[:4], Path(sys.argv[6]), numbers[4])
    else:
        main(tyro.cli(Config))
