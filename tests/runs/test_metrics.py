"""zoo.runs.metrics: metrics of killed, resumed and diverged runs stay readable and true."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from matplotlib.image import imread

from zoo.common import files
from zoo.runs import metrics


def write_run(path: Path, steps: range, *, resume_step: int = 0) -> None:
    log = metrics.MetricsLog(path, resume_step=resume_step)
    for step in steps:
        log.write(step, loss=10.0 / step, note="a line\nwith ünicode", missing=None)
    log.close()


# metrics.jsonl


def test_each_line_is_written_immediately(tmp_path: Path):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, loss=2.0)
    assert metrics.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    log.close()


def test_non_finite_values_round_trip_as_json(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.MetricsLog(path)
    log.write(1, a=math.nan, b=math.inf, c=-math.inf, d=np.float64("nan"))
    log.close()

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = metrics.read_metrics(path)
    assert math.isnan(record["a"])
    assert math.isnan(record["d"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_truncated_log_resumes_identically(tmp_path: Path):
    straight, killed = tmp_path / "straight.jsonl", tmp_path / "killed.jsonl"
    write_run(straight, range(1, 7))
    whole = straight.read_bytes()
    last_two = sum(map(len, whole.splitlines(keepends=True)[-2:]))
    for kept in range(len(whole) - last_two, len(whole) + 1):
        killed.write_bytes(whole[:kept])
        written = metrics.read_metrics(killed)
        assert [record["step"] for record in written] == list(range(1, len(written) + 1))
        assert len(written) >= 4
        write_run(killed, range(4, 7), resume_step=3)  # the last checkpoint was at step 3
        assert killed.read_bytes() == whole


def test_new_runs_empty_the_log(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "eval_loss": 5.0}\n{"step": 1}\n')
    write_run(path, range(1, 2))
    assert [record["step"] for record in metrics.read_metrics(path)] == [1]


@pytest.mark.parametrize(
    "damage", [b'{"step": 2, "lo', b"\0\0\0", b"\xff\xfe", b"3", b'{"loss": 1}']
)
def test_damaged_line_is_named_and_kept(tmp_path: Path, damage: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is damaged .* remove it"):
        metrics.MetricsLog(path, resume_step=3)
    assert path.read_bytes().endswith(b'{"step": 3}\n')


def test_failed_rewrite_keeps_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_run(path, range(1, 4))
    whole = path.read_bytes()
    monkeypatch.setattr(files.os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        metrics.MetricsLog(path, resume_step=1)
    assert path.read_bytes() == whole


# curves.png


def write_curves(path: Path, steps: int, *, drop: tuple[str, ...] = ()) -> None:
    log = metrics.MetricsLog(path)
    noise = np.random.default_rng(0).normal(size=steps + 1)
    for step in range(1, steps + 1):
        values = {
            "loss": math.nan if step == 20 else 2.0 + 4.0 / step + 0.05 * float(noise[step]),
            "learning_rate": 1e-3 * min(1.0, step / 10),
            "grad_norm": 100.0 / step,
            "tokens_per_second": 9e3 if step > 1 else None,
            "eval_loss": 2.1 + 4.0 / step if step % 10 == 0 else None,
        }
        log.write(step, **{name: value for name, value in values.items() if name not in drop})
    log.close()


def axes_of(figure_spy: mock.Mock) -> dict[str, object]:
    (figure,) = [call.args[0] for call in figure_spy.call_args_list]
    return {axes.get_ylabel(): axes for axes in figure.axes}


@pytest.fixture
def figure_spy(monkeypatch) -> mock.Mock:
    """Sees the figure that is saved, and saves it."""
    from matplotlib.figure import Figure

    spy = mock.Mock(wraps=Figure.savefig)
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: spy(*args, **kwargs))
    return spy


def test_curves_show_every_metric(tmp_path: Path, figure_spy: mock.Mock):
    write_curves(tmp_path / "metrics.jsonl", 60)
    metrics.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    axes = axes_of(figure_spy)
    assert set(axes) == {"loss", "learning rate", "grad norm", "tokens per second"}
    raw, smoothed, held_out = axes["loss"].lines
    assert len(raw.get_xdata()) == 60
    assert list(held_out.get_xdata()) == [10, 20, 30, 40, 50, 60]
    assert np.isnan(raw.get_ydata()).sum() == np.isnan(smoothed.get_ydata()).sum() == 1
    assert axes["grad norm"].get_yscale() == "log"
    assert axes["loss"].get_yscale() == axes["learning rate"].get_yscale() == "linear"
    image = imread(tmp_path / "curves.png")
    assert image.shape[0] > 500
    assert image.std() > 0.05
    assert [path.name for path in tmp_path.glob("curves*")] == ["curves.png"]


def test_curves_show_each_named_evaluation(tmp_path: Path, figure_spy: mock.Mock):
    path = tmp_path / "metrics.jsonl"
    write_curves(path, 20)
    with path.open("a") as file:
        for step, loss in ((10, 3.0), (20, 2.0)):
            values = {"average/eval_loss": loss, "web/eval_loss": loss + 1, "web/accuracy": 0.5}
            values["code/loss"] = loss + 2  # of a mixture's source
            file.write(json.dumps({"step": step, **values}) + "\n")
    metrics.plot_curves(path, tmp_path / "curves.png")
    losses = axes_of(figure_spy)["loss"]
    *_, held_out, average, web, code = losses.lines
    assert list(held_out.get_xdata()) == [10, 20]
    assert list(average.get_ydata()) == [3.0, 2.0]
    assert list(web.get_ydata()) == [4.0, 3.0]
    labels = [text.get_text() for text in losses.get_legend().get_texts()]
    assert list(code.get_xdata()) == [10, 20]
    assert labels[-3:] == ["average (last 2.000)", "web (last 3.000)", "training, code"]
    assert len({line.get_color() for line in (held_out, average, web, code)}) == 4


def test_no_plot_without_finite_values(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": "nan"}\n')
    metrics.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_smoothing_removes_noise_not_trend():
    line = np.linspace(5.0, 1.0, 1000)
    noise = np.random.default_rng(0).normal(size=1000)
    smooth = metrics._smooth(line + noise)
    np.testing.assert_allclose(metrics._smooth(line)[50:-50], line[50:-50], rtol=1e-9)
    assert np.std(smooth - line) < 0.3
    assert len(metrics._smooth(line[:1])) == 1


def test_samples_are_a_page_with_the_newest_first(tmp_path: Path):
    """The texts stay what they are, and of many the page keeps a spread."""
    log = metrics.MetricsLog(tmp_path / "samples.jsonl")
    for step in range(1, 501):
        log.write(step, text=f"<b>{step} & more\nof it")
    log.close()
    metrics.show_samples(tmp_path / "samples.jsonl", tmp_path / "samples.html")
    page = (tmp_path / "samples.html").read_text()
    steps = [int(x) for x in re.findall(r"<h2>step (\d+)</h2>", page)]
    assert steps == list(range(500, 0, -3))
    assert "<pre>&lt;b&gt;500 &amp; more\nof it</pre>" in page
    ElementTree.fromstring(
        page[page.index("<h1>") :].replace("<h1>", "<r><h1>").replace("</html>", "</r>")
    )
