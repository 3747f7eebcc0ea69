"""`transformers` as an engine that serves an exported model."""

from pathlib import Path

import numpy as np
import torch
import transformers


class Engine:
    """`AutoModelForCausalLM` and its `generate`, in fp32."""

    def __init__(self, folder: Path):
        transformers.logging.set_verbosity_error()
        opened = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model, settings = opened.eval(), opened.generation_config
        ends = settings.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else ends or []
        settings.eos_token_id, settings.pad_token_id = None, 0

    def logits(self, prompts: list[list[int]]) -> list[np.ndarray]:
        """The logits behind each token, fp32[seq, vocab], per prompt."""
        with torch.inference_mode():
            return [self.model(torch.tensor([ids])).logits[0].numpy() for ids in prompts]

    def generate(self, prompts: list[list[int]], num_tokens: int, stop: bool) -> list[list[int]]:
        """The greedy tokens after each prompt, with its end if they `stop` there."""
        length = max(map(len, prompts))
        tokens = torch.tensor([[0] * (length - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts])
        ends = self.ends if stop else []
        with torch.inference_mode():
            found = self.model.generate(
                tokens,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=ends or None,
            )
        return [_cut(row, ends) for row in found[:, length:].tolist()]


def _cut(ids: list[int], ends: list[int]) -> list[int]:
    places = [place for place, token in enumerate(ids) if token in ends]
    return ids[: places[0] + 1] if places else ids
