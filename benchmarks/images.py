"""Pictures as rows: how many per second, in how many threads, and what a large folder takes.

python -m benchmarks.images

A second of processor time makes as many rows on a busy machine; the clock's seconds say what the
threads are worth on a quiet one.
"""

import contextlib
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

import zoo
from benchmarks.harness import Table, main, memory
from zoo import images
from zoo.data.loader import batches

SIZE, BATCH, WARM_UP = 224, 64, 4


def pictures(files: int = 100_000, jpegs: int = 256, steps: int = 8) -> list[Table]:
    """Rates of decoding and of transforms, by the threads of a batch, and a folder's memory.

    Args:
        files: Empty files of the folder that is listed.
        jpegs: Pictures of 500 x 375 that are decoded.
        steps: Batches of 64 that are timed.
    """
    rates = Table(f"rows per second, batches of {BATCH}, two at a time, {os.cpu_count()} cores")
    processor, crop = images.Processor(), images.crop(SIZE)
    transforms: dict[str, Any] = {
        "JPEGs decoded, cropped, flipped, normalised": lambda row, rng: processor(
            images.flip(crop(row, rng), rng)
        ),
        "arrays flipped, normalised": lambda row, rng: processor(images.flip(row, rng)),
        "arrays flipped": images.flip,
        "arrays as they are": None,
    }
    with tempfile.TemporaryDirectory() as place:
        names = listed(Path(place, "large"), files)  # before other things take memory
        write_jpegs(Path(place, "photos"), jpegs)
        pixels = np.random.default_rng(0).integers(0, 256, (256, SIZE, SIZE, 3), np.uint8)
        arrays = {"image": pixels, "label": np.zeros(256, np.int32)}
        for (name, transform), threads in itertools.product(transforms.items(), (1, 2, 4)):
            source = images.Folder(Path(place, "photos")) if "JPEG" in name else arrays
            data = zoo.batches(source, BATCH, transform=transform, threads=threads)
            clock, processor_time = seconds_of(data, steps)
            rates.add(
                rows=name,
                threads=threads,
                per_second=BATCH * steps / clock,
                per_second_of_processor=BATCH * steps / processor_time,
            )
        return [rates, names]


def write_jpegs(folder: Path, count: int) -> None:
    """JPEGs of smooth noise, in two classes."""
    rng = np.random.default_rng(0)
    for i in range(count):
        path = folder / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = PIL.Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
        small.resize((500, 375), PIL.Image.Resampling.BICUBIC).save(path, quality=90)


def seconds_of(data: zoo.Dataset, steps: int) -> tuple[float, float]:
    """The clock's and the processor's seconds of some batches, on the device."""
    with contextlib.closing(batches(data, stop=WARM_UP + steps)) as made:
        for _ in range(WARM_UP):
            next(made)
        clock, processor_time = time.perf_counter(), time.process_time()
        for _, batch in made:
            for array in batch.values():
                array.block_until_ready()
        return time.perf_counter() - clock, time.process_time() - processor_time


def listed(folder: Path, count: int) -> Table:
    """The seconds and the memory of a folder of so many files."""
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
        for i in range(count // 10):
            (folder / str(label) / f"picture-{i:07}.jpg").touch()
    before, clock = memory("VmRSS"), time.perf_counter()
    found = images.Folder(folder)
    seconds = time.perf_counter() - clock
    table = Table("a folder of empty files")
    kept, most = ((memory(name) - before) / 2**20 for name in ("VmRSS", "VmHWM"))
    table.add(files=len(found), seconds=seconds, mib_kept=kept, mib_at_most=most)
    return table


if __name__ == "__main__":
    main(pictures)
