"""CTranslate2 as an engine that serves an exported model."""

import json
import os
import tempfile
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.converters import TransformersConverter


class Engine:
    """A folder converted by `ct2-transformers-converter`, in fp32, with all cores."""

    def __init__(self, folder: Path):
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

    def generate(self, prompts: list[list[int]], num_tokens: int, stop: bool) -> list[list[int]]:
        """The greedy tokens after each prompt, with its end if they `stop` there."""
        found = self.generator.generate_batch(
            [[self.vocabulary[i] for i in ids] for ids in prompts],
            max_length=num_tokens,
            min_length=0 if stop else num_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=self.ends if stop else None,  # None: its own, which `min_length` puts off
            return_end_token=True,
        )
        return [result.sequences_ids[0] for result in found]
