import os
import re
from pathlib import Path

import pytest

import zoo
from recipes import finetune, lm, mlp
from zoo import publish, tabular
from zoo.checkpoint import Checkpointer
from zoo.corpus import tokenize
from zoo.documents import read_documents, read_json_lines
from zoo.files import local_path
from zoo.planning import command
from zoo.tokenizer import ByteTokenizer, load_tokenizer

# --- Where they may be ------------------------------------------------------------------------


def test_a_local_path_stays_and_home_is_found(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    for path in ("runs/a", "/runs/a", "./gs:/a", "a b:c/d", "", "~nobody-of-this-name/a"):
        assert local_path(path, "run_dir") == Path(path)
    assert local_path("~/a", "run_dir") == Path("/somewhere/a")


@pytest.mark.parametrize("path", ["s3://bucket/a/b", "gs://bucket", "FILE://a", "hf+x.y-z://a"])
def test_a_path_on_another_machine_is_refused_with_its_field(path):
    for given in (path, Path(path)):  # a Path has one slash of them left
        with pytest.raises(ValueError, match=f"^run_dir='{re.escape(path)}': only local"):
            local_path(given, "run_dir")


REMOTE = "s3://bucket/thing"
TAKERS = {
    "run_dir": lambda: lm.Config(run_dir=Path(REMOTE)),
    "compilation_cache": lambda: mlp.Config(compilation_cache=Path(REMOTE)),
    "data.cache": lambda: lm.Config(data=zoo.text.Config(cache=Path(REMOTE))),
    "data.tokenizer": lambda: lm.Config(data=zoo.text.Config(tokenizer=REMOTE)),
    "model": lambda: finetune.Config(model=REMOTE),
    "data": lambda: read_documents(f"local/*.txt,{REMOTE}/*.txt"),
    "data of JSON lines": lambda: read_json_lines(f"{REMOTE}.jsonl"),
    "data of rows": lambda: tabular.load(tabular.Config(REMOTE), seed=0),
    "cache_folder": lambda: tokenize([], ByteTokenizer(), Path(REMOTE)),
    "tokenizer": lambda: load_tokenizer(REMOTE),
    "folder of checkpoints": lambda: Checkpointer(Path(REMOTE)),
    "folder of zoo.save": lambda: zoo.save(REMOTE, None),
    "model of zoo.load": lambda: zoo.load(REMOTE),
    "model of zoo.load, as a Path": lambda: publish.load(Path(REMOTE)),
    "folder of adapters": lambda: zoo.lora.load(REMOTE),
    "save": lambda: command.main(command.Config(model="x", target="cpu:1", save=Path(REMOTE))),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_whatever_takes_a_path_refuses_another_machine_and_makes_nothing(
    taker, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("local").mkdir()
    Path("local/a.txt").write_text("a")
    with pytest.raises(ValueError, match=f"^{taker.split()[0]}='{REMOTE}[^']*': only local"):
        TAKERS[taker]()
    assert os.listdir() == ["local"]
