"""Writes scores/: a task for the models of hf/, and what transformers makes of its texts.

Needs PyTorch and transformers, which the tests do not: `python tests/golden/make_scores_golden.py`.
Contexts and continuations are tokenised, cut and windowed as lm-eval does, and scored one by one:
task.jsonl, text.jsonl, a tokenizer of 53 words, and scores.json with a number per choice and text.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

FOLDER = Path(__file__).parent
CASES = ("gemma3", "llama3")
WORDS = ["</s>", *(f"w{i}" for i in range(1, 53))]
LENGTH = 64  # positions of the models


def make_task() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(WORDS[i] for i in rng.integers(1, len(WORDS), count))

    # The last ones are longer than the models' positions; the first context is empty.
    lengths = [0, 1, 5, 12, 16, 17, 30, 45, 63, 64, 90]
    return [
        {
            "context": words(length) + " " * (length == 12),
            "choices": [words(int(n)) for n in rng.integers(1, 6, 2 + length % 3)],
            "answer": length % 2,
        }
        for length in lengths
    ]


def make_texts() -> list[dict[str, str]]:
    rng = np.random.default_rng(1)
    return [
        {"text": " ".join(WORDS[i] for i in rng.integers(1, len(WORDS), count))}
        for count in (1, 20, 64, 65, 128, 150)
    ]


def pairs(tokenizer: Any, record: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    found = []
    for choice in record["choices"]:
        context, continuation = record["context"], " " + choice
        if blanks := len(context) - len(context.rstrip()):
            continuation = context[-blanks:] + continuation
            context = context[:-blanks]
        whole, before = encode(context + continuation), encode(context)
        found.append((before or [tokenizer.eos_token_id], whole[len(before) :]))
    return found


def windows(ids: list[int], prefix: int) -> list[tuple[list[int], list[int]]]:
    """(context, continuation) of `get_rolling_token_windows` and `make_disjoint_window`."""
    first = min(LENGTH, len(ids))
    found = [([prefix], ids[:first])]
    done = first
    while done < len(ids):
        count = min(len(ids) - done, LENGTH)
        end = done + count
        inputs, scored = ids[end - LENGTH - 1 : end - 1], ids[end - count : end]
        found.append((inputs[: len(inputs) - (len(scored) - 1)], scored))
        done = end
    return found


def score(model: torch.nn.Module, context: list[int], continuation: list[int]) -> list[Any]:
    inputs = torch.tensor([(context + continuation)[-(LENGTH + 1) :][:-1]])
    with torch.no_grad():
        logits = model(input_ids=inputs).logits.float()
    scores = torch.log_softmax(logits[0, -len(continuation) :], dim=-1)
    target = torch.tensor(continuation)
    total = scores.gather(1, target[:, None]).sum().item()
    return [round(total, 6), bool((scores.argmax(-1) == target).all())]


def main() -> None:
    folder = FOLDER / "scores"
    folder.mkdir(exist_ok=True)
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    inner.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    task, texts, scores = make_task(), make_texts(), {}
    for name, records in (("task", task), ("text", texts)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    for case in CASES:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            FOLDER / "hf" / case,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        ).eval()
        choices = [[score(model, *pair) for pair in pairs(tokenizer, one)] for one in task]
        ids = [tokenizer(one["text"], add_special_tokens=False)["input_ids"] for one in texts]
        rolling = [
            round(sum(score(model, *window)[0] for window in windows(text, 0)), 6) for text in ids
        ]
        scores[case] = {"choices": choices, "texts": rolling}
        print(case, choices[2], rolling)
    (folder / "scores.json").write_text(json.dumps(scores) + "\n")


if __name__ == "__main__":
    main()
