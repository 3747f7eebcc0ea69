"""Data at addresses, by way of the recipe: raw files, and a corpus prepared from and to there."""

import gzip
import json
import re
from pathlib import Path

import pytest
from recipe_cases import Program, finish
from stores import Store, gs, gs_port, s3, s3_port  # noqa: F401

from zoo.common.store import location

SMALL = (
    "--steps=2", "--model.d-model=32", "--model.num-layers=1", "--model.num-heads=2",
    "--model.attention.num-kv-heads=2",
    "--data.seq-len=32", "--data.batch-size=8", "--sample-tokens=4",
)  # fmt: skip


def run(*arguments: str, home: Path) -> str:
    return finish(Program(["-m", *arguments], HOME=str(home)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gs"])
def test_a_corpus_is_prepared_from_and_to_a_store(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
):
    store: Store = request.getfixturevalue(kind)
    raw = location(f"{store.address}/raw", "data")
    for number in range(3):
        texts = [f"document {number} {i} " + "word " * (i % 17) for i in range(120)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        content = gzip.compress(lines, mtime=0)
        (raw / f"{number}.jsonl.gz").write_bytes(content)
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / "raw" / f"{number}.jsonl.gz").write_bytes(content)
    there, here = f"{store.address}/corpus", str(tmp_path / "corpus")

    def falters(number: int, method: str, path: str) -> int | str | None:
        return 500 if number % 3 == 0 else "drop" if number % 5 == 0 else None

    with store.proxied(falters):
        run("zoo", "prepare", f"{raw}/*.jsonl.gz", "--out", there, home=tmp_path)
    run("zoo", "prepare", f"{tmp_path}/raw/*.jsonl.gz", "--out", here, home=tmp_path)
    prints = [
        json.loads((location(folder, "data") / "manifest.json").read_text())["fingerprint"]
        for folder in (there, here)
    ]
    assert prints[0] == prints[1]
    home = tmp_path / "there"
    run("recipes.lm", *SMALL, f"--data.files={there}", f"--run-dir={home / 'run'}", home=home)
    assert '"loss": ' in (home / "run" / "metrics.jsonl").read_text()
    assert re.search(r"copies", str(next((tmp_path / "there/.cache").rglob("*.tokens"))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3"])
def test_a_mixture_of_parquet_shards_is_read_from_a_store(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    store: Store = request.getfixturevalue(kind)
    for name, word in (("code-0", "def "), ("code-1", "return "), ("help-0", "usage ")):
        texts = [f"{name} {i} " + word * (i % 13) for i in range(150)]
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name)
        shard = (tmp_path / name).read_bytes()
        (location(f"{store.address}/raw", "data") / f"{name}.parquet").write_bytes(shard)
    folder = f"{store.address}/raw"
    mixture = f"code={folder}/code-*.parquet:0.7,help={folder}/help-*.parquet:0.3"
    run("recipes.lm", *SMALL, "--data", mixture, f"--run-dir={tmp_path / 'run'}", home=tmp_path)
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    code, usage = [(row["code/tokens"], row["help/tokens"]) for row in rows if "loss" in row][-1]
    assert usage > 0
    assert code / (code + usage) == pytest.approx(0.7, abs=0.05)
