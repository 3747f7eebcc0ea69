"""The pictures of the pages are made from the code and its results, as they are committed."""

import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jax
import numpy as np
import pictures
import pytest
from matplotlib.image import imread

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
SVG = "{http://www.w3.org/2000/svg}"
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def texts(path: Path) -> list[str]:
    return [x.text or "" for x in ElementTree.parse(path).iter(f"{SVG}text")]


def boxes(path: Path) -> list[dict[str, str]]:
    return [x.attrib for x in ElementTree.parse(path).iter(f"{SVG}rect")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("layer", "kill") else [])
        for name in pictures.PICTURES
    ],
)
def test_the_command_makes_what_is_committed(name, tmp_path):
    """Curves are compared by what is written beside them: losses differ between machines."""
    pictures.main([name], tmp_path)
    made, kept = tmp_path / f"{name}.svg", ASSETS / f"{name}.svg"
    assert texts(made) == texts(kept)
    assert boxes(made) == boxes(kept)


def test_an_unknown_picture_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"no picture peices: .*pieces"):
        pictures.main(["peices"], tmp_path)


def test_pieces_follow_the_rules():
    """w_up is 8 × 12, of 6 pixels each; the third device is fsdp 1, tensor 0."""
    third = {"x": "576", "y": "108", "width": "36", "height": "24"}
    assert any(third.items() <= box.items() for box in boxes(ASSETS / "pieces.svg"))
    rules = {**pictures.zoo.sharding.RULES, "mlp": None}
    assert "mlp → None, 12 in 1 parts" in pictures.pieces(rules).svg()


def test_padding_is_drawn_as_large_as_it_is():
    """The filled part of all boxes of a column, beside the share that its head says."""
    path = ASSETS / "buckets.svg"
    for head, column in zip(texts(path)[:2], ("20", "400"), strict=True):
        of_column = [box for box in boxes(path) if box.get("x") == column]
        rows = [float(box["width"]) for box in of_column if box["class"] == "none"]
        tokens = [float(box["width"]) for box in of_column if box["class"] != "none"]
        said = float(re.findall(r"(\d+)% padding", head)[0]) / 100
        assert abs(1 - sum(tokens) / sum(rows) - said) < 0.01


def test_a_kill_loses_what_the_picture_says():
    said = " ".join(texts(ASSETS / "kill.svg"))
    assert "Steps 21 to 27" in said
    assert "equal to the last bit" in said


def test_pictures_are_in_pages_with_alternative_texts():
    """And can be read in both schemes; what is for other sites is in no page."""
    shown = set()
    for page in PAGES:
        for text, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            path = (page.parent / target).resolve()
            assert path.is_file(), f"{page.name}: no {target}"
            assert len(text) > 20, f"{page.name}: {target} needs a text for who does not see it"
            shown.add(path.name)
    made = {"recording.svg", *(f"{name}.svg" for name in pictures.PICTURES)}
    assert made - shown == {"logo.svg", "card.svg"}
    for name in made:
        assert "prefers-color-scheme:dark" in (ASSETS / name).read_text()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="this needs Chromium")
def test_the_card_for_other_sites_is_the_picture(tmp_path):
    pictures.photograph(ASSETS / "card.svg", tmp_path / "card.png")
    made, kept = imread(tmp_path / "card.png"), imread(ASSETS / "card.png")
    assert made.shape[:2] == kept.shape[:2] == (640, 1280)
    assert kept.std() > 0.1
    assert np.abs(made - kept).mean() < 0.02  # another machine has other fonts


# What the main command's terminal is: lines above a bar that is drawn over itself, in colours.
BAR = """
import time
from rich.progress import Progress
with Progress(expand=True) as progress:
    task = progress.add_task("train", total=3)
    for step in range(1, 4):
        progress.update(task, completed=step, refresh=True)
        progress.console.print(f"step {step}: <eval>")
        time.sleep(0.6)
print("ended")
"""


def test_a_recording_plays_what_a_terminal_showed(tmp_path):
    recording = pytest.importorskip("recording", exc_type=ImportError)
    recording.main(tmp_path / "a.svg", [sys.executable, "-c", BAR])
    lines = list(ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}text"))
    shown = [("".join(x.itertext()).strip(), "end" in x.attrib["class"].split()) for x in lines]
    assert ("step 2: <eval>", True) in shown
    assert ("ended", True) in shown
    bars = [(text, last) for text, last in shown if text.startswith("train")]
    assert [last for _, last in bars] == [False] * (len(bars) - 1) + [True]
    assert len(bars) > 2
    assert "100%" in bars[-1][0]
    assert "@keyframes" in (tmp_path / "a.svg").read_text()
    with pytest.raises(SystemExit, match="ended with 3: nothing is drawn"):
        recording.main(tmp_path / "b.svg", [sys.executable, "-c", "print(); raise SystemExit(3)"])
    assert not (tmp_path / "b.svg").exists()


def test_the_recording_ends_with_the_result():
    lines = ElementTree.parse(ASSETS / "recording.svg").iter(f"{SVG}text")
    last = ["".join(x.itertext()) for x in lines if "end" in x.attrib["class"].split()]
    assert any("bits per byte" in line for line in last)
    assert any("train 500/500" in line for line in last)
