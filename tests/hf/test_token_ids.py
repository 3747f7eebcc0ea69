"""zoo.hf.token_ids: the ids that end a text, read, refused, and written."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import drawn_transformer
from hf_cases import IDS, Ends, contents, edit, refusal

import zoo
from zoo.publishing import models

# Token ids


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 3}, None, (3,)),
        ({"eos_token_id": [3, 4]}, None, (3, 4)),
        ({"eos_token_id": 3}, {"eos_token_id": [5, 3]}, (5, 3)),
        ({"eos_token_id": 3}, {"bos_token_id": 1}, (3,)),
        ({}, {"eos_token_id": 0}, (0,)),
        ({}, {}, ()),
    ],
    ids=str,
)
def test_the_ids_that_end_a_text_are_read(config: dict, generation: Any, ids: Any, copy: Any):
    folder = copy("llama2")
    edit(folder, **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert models.skeleton(folder).config.eos_ids == ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id="),
        ('{"eos_token_id": [true]}', "eos_token_id="),
        ("[", "is damaged"),
    ],
)
def test_damaged_ids_are_refused(content: str, message: str, copy: Any):
    folder = copy("llama2")
    (folder / "generation_config.json").write_text(content)
    text = refusal(folder)
    assert message in text
    assert "generation_config.json" in text


@pytest.mark.parametrize("ids", [53, [3, 53], -1])
def test_ends_that_are_never_drawn_are_kept(ids: Any, copy: Any, caplog: Any, tmp_path: Path):
    folder = copy("llama2")
    edit(folder, eos_token_id=ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    model = zoo.load(folder)
    assert model.config.eos_ids == ((3,) if isinstance(ids, list) else ())
    [warning] = caplog.messages
    assert "has ids beyond vocab_size=53" in warning
    zoo.save(tmp_path / "again", model, format="hf", like=folder)
    values, generation = contents(tmp_path / "again")
    assert values["eos_token_id"] == generation["eos_token_id"] == ids
    assert zoo.load(tmp_path / "again").config == model.config


@pytest.mark.parametrize(
    ("tokenizer", "own", "ids", "generation"),
    [
        (None, (), (None, None, None), None),
        (None, (4,), (None, 4, None), {"eos_token_id": 4}),
        (Ends(), (), (1, [2, 3], 0), dict(zip(IDS, (1, [2, 3], 0), strict=True))),
        (Ends(), (4, 5), (1, [4, 5], 0), dict(zip(IDS, (1, [4, 5], 0), strict=True))),
    ],
    ids=["none", "own", "tokenizer", "both"],
)
def test_ids_are_written(tokenizer: Any, own: Any, ids: Any, generation: Any, tmp_path: Path):
    model = drawn_transformer(num_layers=1, eos_ids=own)
    zoo.save(tmp_path / "model", model, format="hf", tokenizer=tokenizer)
    values, written = contents(tmp_path / "model")
    assert tuple(values[name] for name in IDS) == ids
    assert written == generation
    eos = ids[1] if isinstance(ids[1], list) else [ids[1]] if ids[1] is not None else []
    assert zoo.load(tmp_path / "model").config.eos_ids == tuple(eos)
