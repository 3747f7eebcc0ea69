"""The pass of a teacher over the batches of a run, which writes its likeliest tokens to disk."""

import contextlib
from collections.abc import Callable

from jaxtyping import Array, PyTree

from zoo.common.files import Transfer
from zoo.data.loader import batches
from zoo.data.plans import Plan, batch_shapes
from zoo.data.top_k import StoredTopK
from zoo.nn.precision import in_precision
from zoo.runs import processes
from zoo.runs.config import Config as RunConfig
from zoo.runs.run import Run
from zoo.sharding.placement import gathered
from zoo.training.compiled import CompiledStep
from zoo.training.distillation import top_k


def write_top_k(
    run: Run[RunConfig],
    stored: StoredTopK,
    plan: Plan,
    load: Callable[[], PyTree],
    temperature: float,
) -> None:
    """Write the entries of every batch of the run that is not there yet; one is in memory at once.

    Process 0 writes, in a folder that all of them read.
    """
    start, stop = stored.num_batches, run.config.steps
    processes.barrier("stored batches")
    if start >= stop:
        return run.say(f"the teacher's {stored.top_k} likeliest tokens are in {stored.folder}")
    size = (stop - start) * stored.bytes_per_token * plan.batch_size * max(plan.buckets)
    run.say(
        f"writing the teacher's {stored.top_k} likeliest tokens of batches {start} to {stop - 1} "
        f"to {stored.folder}: {size / 1e6:,.0f} MB at most"
    )
    model = load()

    def teacher_step(batch: PyTree, model: PyTree) -> tuple[None, dict[str, Array]]:
        with in_precision(model, run.precision) as given:
            return None, top_k(given, batch, stored.top_k, temperature)

    step = CompiledStep(teacher_step, mesh=run.layout)
    step.compile(model, *batch_shapes(plan, run.mesh).values())
    with (
        Transfer("the teacher's tokens", size) as done,
        contextlib.closing(batches(plan, run.mesh, start=start, stop=stop)) as stream,
    ):
        for k, batch in stream:
            entries = {name: gathered(x) for name, x in step(model, batch)[1].items()}
            if run.is_main:
                stored.write(k, entries)
                done.add(sum(x.nbytes for x in entries.values()))
    processes.barrier("stored top k")
