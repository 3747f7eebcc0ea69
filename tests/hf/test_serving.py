"""Exported models served by other engines; and speculative decoding's benchmark."""

import json
import os
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_transformer

import zoo
from benchmarks import decoding
from benchmarks.harness import Timing

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]


class CTranslate2:
    """A folder converted by `ct2-transformers-converter`, in fp32, with all cores."""

    def __init__(self, folder: Path):
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        with tempfile.TemporaryDirectory() as converted:
            TransformersConverter(str(folder)).convert(converted, force=True)
            self.generator = ctranslate2.Generator(
                converted, compute_type="float32", intra_threads=os.cpu_count() or 1
            )
            self.vocabulary = json.loads((Path(converted) / "vocabulary.json").read_text())
        settings = folder / "generation_config.json"
        ends = json.loads(settings.read_text()).get("eos_token_id") if settings.exists() else None
        self.ends = [ends] if isinstance(ends, int) else ends or []

    def logits(self, prompts: list[list[int]]) -> list[np.ndarray]:
        """The logits behind each token, fp32[seq, vocab], per prompt."""
        return [np.array(self.generator.forward_batch([ids]))[0] for ids in prompts]

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """The greedy tokens after each prompt, with its end."""
        found = self.generator.generate_batch(
            [[self.vocabulary[i] for i in ids] for ids in prompts],
            max_length=num_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=self.ends,
            return_end_token=True,
        )
        return [result.sequences_ids[0] for result in found]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_exports_are_served_with_equal_logits_tokens_and_stops(family: str, tmp_path: Path):
    """Those of transformers are compared by `test_transformers_opens_saved_models`."""
    pytest.importorskip("transformers", reason="what converts for the engine")
    pytest.importorskip("ctranslate2", reason="an engine to serve exported models")
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
    served = CTranslate2(tmp_path)
    zoo_logits = [np.asarray(model(jnp.asarray([ids], jnp.int32)))[0] for ids in PROMPTS]
    for ours, theirs in zip(zoo_logits, served.logits(PROMPTS), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-4)
    rows = zoo.generate(model, PROMPTS, max_new_tokens=16, temperature=0.0)
    ours = [row[len(ids) :] for row, ids in zip(rows, PROMPTS, strict=True)]
    assert served.generate(PROMPTS, 16) == ours
    assert sum(len(tokens) < 16 for tokens in ours) >= 2  # came to a stop


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": (0,)}, r"draft_tokens=\(0,\) must be"),
        ({"new_tokens": 1}, r"new_tokens=1 .* 2"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        decoding.Drafts(**options)


@pytest.mark.slow
def test_a_draft_that_is_the_model_is_always_kept():
    options = decoding.Drafts(
        draft_tokens=(3,), batch_sizes=(2,), temperatures=(0.0,), new_tokens=17
    )
    [table] = decoding.speculative(options, Timing(rounds=1))
    assert table.failures == []
    assert (table.rows[1]["kept"], table.rows[1]["tokens per step"]) == ("100%", 4.0)
