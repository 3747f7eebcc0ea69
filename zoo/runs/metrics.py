"""The numbers and texts of a run as files: metrics.jsonl, its curves, samples as a page."""

import html
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from zoo.common import files
from zoo.common.store import location

Number = float | int  # spelled out for run-time checkers, to which an int is no float


Value = Number | str | None | list[Any]


_NON_FINITE = ("nan", "inf", "-inf")  # as Python's float() reads them; JSON has no such numbers


def _to_line(record: dict[str, Any]) -> str:
    strict = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(strict, allow_nan=False) + "\n"


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, which may be at an address, in the order of the file.

    `"nan"`, `"inf"` and `"-inf"` come back as floats. A torn last line, which a killed process
    leaves, is dropped; a damaged line before it is a ValueError that names its number.
    """
    lines = location(path, "path").read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError("it is no JSON object with an integer `step`")
        except ValueError as error:
            if number == len(lines):
                break
            message = f"{path}: line {number} is damaged ({error}); remove it: {line[:80]!r}"
            raise ValueError(message) from error
        records.append({k: float(v) if v in _NON_FINITE else v for k, v in record.items()})
    return records


def kept_records(path: Path, resume_step: int) -> list[dict[str, Any]]:
    """The records that a run keeps when it resumes at a step: none at 0, where it begins anew."""
    records = read_metrics(path) if resume_step and path.exists() else []
    return [record for record in records if record["step"] <= resume_step]


class MetricsLog:
    """metrics.jsonl: an append-only file, one JSON object per line, flushed line by line.

    Every line is strict JSON: a float that is not finite is written as `"nan"`, `"inf"` or
    `"-inf"`, which `read_metrics` turns back. `resume_step` is the number of steps that the run
    has behind it: a torn last line and the lines of later steps are dropped, so that a killed and
    resumed run's file holds each step once; 0 begins an empty file. One process alone may write.
    """

    def __init__(self, path: Path, *, resume_step: int = 0):
        kept = "".join(_to_line(record) for record in kept_records(path, resume_step))
        files.replace(path, kept)
        self._file = path.open("a")

    def write(self, step: int, **values: Value) -> None:
        """Append one line."""
        with files.named(Path(self._file.name)):
            self._file.write(_to_line({"step": step, **values}))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with files.named(Path(self._file.name)):  # it retries a write that a full disk refused
            self._file.close()


def _series(records: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values float64[n] of one metric; a value that is not finite is a gap (nan)."""
    pairs = [(r["step"], r[name]) for r in records if isinstance(r.get(name), float | int)]
    steps, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return steps, np.where(np.isfinite(values), values, np.nan)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average float64[n]: unlike an exponential one it does not lag behind."""
    radius = min(len(values) // 50, 500)
    kernel = np.hanning(2 * radius + 3)[1:-1]
    finite = np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    weight = np.convolve(finite.astype(np.float64), kernel, mode="same")
    return np.where(finite, total / np.where(finite, weight, 1.0), np.nan)


REWARDS = ("reward", "pass@1")


def plot_curves(metrics_path: Path, png_path: Path) -> None:
    """Draw a run's metrics.jsonl as curves.png: loss, learning rate, gradient norm, speed.

    Draws whichever of `loss`, `next_token` (its part, where it has others), `eval_loss`,
    `learning_rate`, `grad_norm`, `tokens_per_second` and `examples_per_second` the file holds, the
    `eval_loss` of further evaluations (`average/eval_loss`) and the `loss` of a mixture's sources
    (`code/loss`) by their names, and no picture when it holds none of them. For a run on rewards,
    `reward` and `pass@1` are in the place of losses.
    """
    from matplotlib.figure import Figure  # here: a run need not wait for it before its first step
    from matplotlib.ticker import EngFormatter, MaxNLocator

    records = read_metrics(metrics_path)
    parts = ("/eval_loss", "/loss")  # of further evaluations; of the sources of a mixture
    named = dict.fromkeys(n for r in records for n in r if n.endswith(parts))
    losses = ("loss", "next_token", "eval_loss", *named)
    speeds = ("tokens_per_second", "examples_per_second")
    panels = ("learning_rate", "grad_norm", *speeds)
    series = {name: _series(records, name) for name in (*losses, *panels, *REWARDS)}
    series = {name: xy for name, xy in series.items() if np.isfinite(xy[1]).any()}
    left = ["losses"] if any(name in series for name in losses) else []
    right = [name for name in panels if name in series]
    if not series:
        return

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    mosaic: Any = [[*left, name] for name in right] or [left]
    ratios = [2, 1] if left and right else [1]
    axes = figure.subplot_mosaic(mosaic, width_ratios=ratios, sharex=True)
    if left:
        _draw_main(axes["losses"], series)
    for name in right:
        axes[name].plot(*series[name], color="C2", linewidth=1.2)
        axes[name].set_ylabel(name.replace("_", " "))
    for name in set(speeds) & set(right):
        axes[name].set_ylim(bottom=0)
        axes[name].yaxis.set_major_formatter(EngFormatter(sep=""))
    for name, each in axes.items():
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
        each.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        each.set_xlabel("step" if name in (*left, *right[-1:]) else "")
        low, high = each.dataLim.intervaly
        if name in ("losses", "grad_norm") and high > 30 * low > 0:
            each.set_yscale("log")
    files.replace(png_path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def _draw_main(axes: Any, series: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """The losses; for a run on rewards, whose loss says nothing, the rewards."""
    name = "reward" if "reward" in series else "loss"
    title = "training" if name == "loss" else name
    evaluations = [x for x in series if x.endswith("eval_loss")]
    if name == "reward":
        evaluations = [x for x in series if x == "pass@1"]
    if name in series:
        steps, values = series[name]
        axes.plot(steps, values, color="C0", linewidth=0.7, alpha=0.35, label=f"{title}, raw")
        axes.plot(steps, _smooth(values), color="C0", linewidth=1.8, label=f"{title}, smoothed")
    if name == "loss" and "next_token" in series:  # of one with other parts: as the held-out loss
        steps, values = series["next_token"]
        axes.plot(steps, _smooth(values), "C0--", linewidth=1.2, label="training, next token")
    for index, each in enumerate(evaluations, start=1):
        steps, values = series[each]
        of = "held out, pass@1" if name == "reward" else each.rpartition("/")[0] or "held out"
        label = f"{of} (last {values[-1]:.3f})"
        axes.plot(steps, values, f"C{index}o-", linewidth=1.5, markersize=4, label=label)
    sources = [x for x in series if x.endswith("/loss")]
    for index, each in enumerate(sources, start=len(evaluations) + 1):
        steps, values = series[each]
        label = f"training, {each.removesuffix('/loss')}"
        axes.plot(steps, _smooth(values), f"C{index}", linewidth=1.2, label=label)
    axes.set_ylabel(name)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>Samples</title>
<style>body {{ font: 16px system-ui; max-width: 50rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid #8a8f98;
padding-left: 1rem }}</style>
<h1>Samples, the newest first</h1>
{}
</html>
"""
MOST_SAMPLES = 200


def show_samples(samples_path: Path, page_path: Path) -> None:
    """Show the texts of a samples.jsonl as one HTML page, with the newest first.

    Of more than 200 every second, third, … is shown, so that the page does not grow with the run.
    """
    records = read_metrics(samples_path)
    records = records[:: -max(1, -(-len(records) // MOST_SAMPLES))]
    parts = [
        f"<h2>step {record['step']}</h2>\n<pre>{html.escape(str(record.get('text', '')))}</pre>"
        for record in records
    ]
    files.replace(page_path, PAGE.format("\n".join(parts)))
