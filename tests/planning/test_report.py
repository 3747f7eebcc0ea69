"""zoo.planning.report: an estimate as a table, its bounds and its verdict."""

import dataclasses
import re

from helpers import small_config
from planning_cases import QUOTED, job, small_estimate

from zoo.planning import (
    command,
    report,
    roofline,
    sizes,
    targets,
)


def test_a_report_says_how_products_of_int8_count():
    estimate = dataclasses.replace(small_estimate(), target=targets.parse("h100:8"))
    remarks = {0.25: "25%, at 1,979 TOP/s; MFU is by the peak of bf16", 0: "counted as that"}
    for share, remark in remarks.items():
        in_int8 = dataclasses.replace(
            estimate, job=job(precision="int8"), int8_flops=share * estimate.flops
        )
        rows = {name: text for name, _, text in report.sections(in_int8)["compute per step"]}
        assert rows["of int8"].endswith(remark)
    assert "of int8" not in dict(x[:2] for x in report.sections(estimate)["compute per step"])


def test_a_report_says_which_bound_is_which():
    estimate = dataclasses.replace(small_estimate(), target=targets.parse("2xh100:4"))
    rows = report.sections(estimate)
    overlapped, by_op = (
        {name: (amount, remark) for name, amount, remark in rows[f"bound {title}"]}
        for title in (
            "of full overlap, at the chip's peaks",
            "by instruction, overlapped as compiled",
        )
    )
    assert "all else hidden" in overlapped["step, at least"][1]
    assert "no overlap but the compiler's" in by_op["step, at least"][1]
    roof = roofline.roofline(estimate)
    assert roof.by_op.seconds > roof.seconds > 0
    assert by_op["step, at least"][0] != overlapped["step, at least"][0]
    assert "step, by published runs" not in by_op  # which are of TPUs
    assert estimate.utilization(roof.by_op.seconds) < estimate.utilization(roof.seconds)
    assert "8 × h100 in 2 machines (fsdp=8)" in report.title(estimate)
    sent = {name: amount for name, amount, _ in rows["bytes sent per device and step"]}
    # Of all gathers of 7 parts one is fetched from the other machine.
    assert sent["all"] != sent["of it, within a slice"]
    assert roof.interconnect > sum(c.total for c in estimate.collectives) / 7 / 50e9 * 0.99


def test_the_range_of_published_runs_is_that_of_the_calibration():
    [page] = (QUOTED.parents[2] / "benchmarks" / "results").glob("*-calibration.md")
    rows = re.findall(
        r"\| (dense|experts) \|.*\]\((https:[^)]*)\) \| \*\*([\d.]+)\*\* \|", page.read_text()
    )
    for kind, found in (("dense", "dense models"), ("experts", "models with experts")):
        ratios = [float(ratio) for name, _, ratio in rows if name == kind]
        assert (min(ratios), max(ratios), len(ratios)) == report.PUBLISHED[found]


def test_tables_in_pipes_do_not_wrap(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    report.show(small_estimate())
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert report.title(small_estimate()) in lines
    assert report.CONVENTION in lines


def test_a_plan_has_one_total_and_a_verdict_against_the_card(capsys, monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "small", small_config())
    config = command.Config(model="small", target="24GiB:1", seq_len=32, method="lora")
    command.main(config)
    memory, _, rest = capsys.readouterr().out.partition("compute per step")
    assert "32 tokens" in memory
    [total] = [line for line in memory.splitlines() if " of " in line]
    assert re.search(r"^  all  .* of 24\.00 GiB, 0%: fits", total)
    assert "peak" not in memory
    assert "no bound on the speed" in rest
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in rest
