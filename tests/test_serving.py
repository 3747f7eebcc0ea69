"""benchmarks.serving and benchmarks.engines: exported models in other engines, and what is said."""

from pathlib import Path

import numpy as np
import pytest
from helpers import drawn_transformer

import zoo
from benchmarks import engines, serving, speculative
from benchmarks.timing import SkippedError, Timing

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]


class Stub:
    """An engine in this process, which may be off."""

    off, other = 0.0, 0

    def __init__(self, name: str, folder: Path):
        if name == "ctranslate2":
            raise SkippedError("No module named 'ctranslate2'")
        self.is_second = name == "transformers"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def logits(self, prompts):
        return [np.full((len(ids), 3), self.off * self.is_second) for ids in prompts]

    def generate(self, prompts, num_tokens, stop=False):
        return [[1, 2 + self.other * self.is_second] for _ in prompts], 0.1


def test_engines_that_differ_are_failures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "Engine", Stub)
    config = serving.Config(new_tokens=8)
    table = serving.compare(config, Path(), PROMPTS)
    assert table.failures == []
    assert [row["peer"] for row in table.rows] == ["zoo", "transformers"]
    assert table.rows[1]["equal continuations"] == "3 of 3"
    assert table.notes == ["ctranslate2: skipped: No module named 'ctranslate2'"]
    monkeypatch.setattr(Stub, "off", 0.01)
    assert serving.compare(config, Path(), PROMPTS).failures == [
        "transformers: logits differ by 1.0e-02"
    ]
    monkeypatch.setattr(Stub, "off", 0.0)
    monkeypatch.setattr(Stub, "other", 1)
    assert serving.compare(config, Path(), PROMPTS).failures == [
        "transformers: 3 continuations differ"
    ]
    monkeypatch.setattr(Stub, "other", 0)
    [failure] = serving.compare(serving.Config(new_tokens=2), Path(), PROMPTS).failures
    assert failure.startswith("no continuation came to a stop")
    alone = serving.Config(engines=("zoo", "ctranslate2"))
    assert "nothing to compare" in serving.compare(alone, Path(), PROMPTS).failures[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: serving.Config(steps=0), "steps=0 must be at least 1"),
        (lambda: serving.Config(engines=("zoo",)), "must be two different ones"),
        (lambda: serving.Config(model=Path("none")), "model=none has no tokenizer.json"),
        (lambda: engines.Options(new_tokens=1), "new_tokens=1 must be at least 2"),
        (lambda: engines.Options(batch_sizes=(0,)), r"batch_sizes=\(0,\) must be at least 1"),
        (lambda: engines.Options(engines=()), "engines is empty"),
        (lambda: speculative.Options(draft_tokens=(0,)), r"draft_tokens=\(0,\) must be"),
        (lambda: speculative.Options(new_tokens=1), "new_tokens=1 must be at least 2"),
    ],
)
def test_wrong_options_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_equal_tokens_are_counted_to_the_first_that_differs():
    wanted = [[1, 2, 3], [4, 5, 6]]
    assert engines._share(wanted, wanted) == "6 of 6"
    assert engines._share([[1, 9, 3], [4, 5]], wanted) == "3 of 6"
    assert engines._share([[], [9, 5, 6]], wanted) == "0 of 6"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("engine", ["transformers", "ctranslate2"])
def test_exports_are_served_with_equal_logits_tokens_and_stops(
    family: str, engine: engines.Name, tmp_path: Path
):
    pytest.importorskip("transformers", reason="the engine, or what converts for it")
    pytest.importorskip(engine, reason="an engine to serve exported models")
    options: dict = {
        "llama": {},
        "qwen3": {"attention.qk_norm": "per_head", "attention.head_dim": 8},
        "gpt2": {
            "residual.norm": "layer", "residual.norm_eps": 1e-5, "positions.kind": "learned",
            "bias": True, "mlp": "gelu",
        },
    }[family]  # fmt: skip
    if family == "gpt2":
        options |= {
            "attention.num_kv_heads": None,
            "attention.head_dim": None,
            "tie_embeddings": True,
        }
    tokenizer = zoo.tokenizer.BPETokenizer.train(["some text to train on"] * 9, 300)
    options |= {"vocab_size": tokenizer.vocab_size, "max_seq_len": 64}
    model = drawn_transformer(**options)
    said = zoo.generate(model, PROMPTS, max_new_tokens=16, temperature=0.0)
    ends = (said[0][len(PROMPTS[0]) + 4], said[1][len(PROMPTS[1]) + 9])
    model = drawn_transformer(**options, eos_ids=ends)
    zoo.save(tmp_path, model, format="hf", tokenizer=tokenizer)
    table = serving.compare(
        serving.Config(engines=("zoo", engine), new_tokens=16), tmp_path, PROMPTS
    )
    assert table.failures == []
    assert len(table.rows) == 2
    assert table.rows[1]["ended by a stop"] >= 2


@pytest.mark.slow
def test_a_draft_that_is_the_model_is_always_kept():
    options = speculative.Options(
        draft_tokens=(3,), batch_sizes=(2,), temperatures=(0.0,), new_tokens=17
    )
    [table] = speculative.measure(options, Timing(rounds=1))
    assert table.failures == []
    assert (table.rows[1]["kept"], table.rows[1]["tokens per step"]) == ("100%", 4.0)
