"""Writes beams.json: what beam search of transformers finds with the models of hf/.

Needs PyTorch and transformers, which the tests do not: `python tests/golden/make_beams_golden.py`.
"""

import itertools
import json
from pathlib import Path

import torch
import transformers

FOLDER = Path(__file__).parent
MODELS = ["gpt2", "llama3", "qwen3"]
PROMPTS = [[7, 3, 50], [11, 2, 9], [30, 41, 5], [1, 0, 6], [52, 12, 33], [20, 19, 18]]
STOPS = [[], [17], [*range(1, 53, 4)]]
NEW, BEAMS = 9, 4


def main() -> None:
    cases = []
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            FOLDER / "hf" / name, dtype=torch.float32
        ).eval()
        for prompt, stops, penalty, early in itertools.product(
            PROMPTS, STOPS, [0.0, 1.0], [False, True]
        ):
            found = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                do_sample=False,
                num_beams=BEAMS,
                num_return_sequences=BEAMS,
                max_new_tokens=NEW,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_id=stops or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            beams = []
            for row in found.sequences[:, len(prompt) :].tolist():
                ends = [i + 1 for i, token in enumerate(row) if token in stops]
                beams.append(row[: min(ends, default=len(row))])
            cases.append(
                {
                    "model": name,
                    "prompt": prompt,
                    "stop_tokens": stops,
                    "length_penalty": penalty,
                    "early_stopping": early,
                    "tokens": beams,
                    "scores": [round(x, 5) for x in found.sequences_scores.tolist()],
                }
            )
    ended = sum(len(beam) < NEW for case in cases for beam in case["tokens"])
    print(f"{len(cases)} cases, {ended} beams come to a stop")
    assert ended > 50
    lines = ",\n".join(json.dumps(case) for case in cases)
    (FOLDER / "beams.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
