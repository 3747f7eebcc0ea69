"""Which of transformers' types of language models open here, and whether any of them opens wrongly.

`python tests/golden/survey.py make FOLDER [TYPE …]`, with PyTorch and transformers, writes a tiny
random checkpoint of each type that `AutoModelForCausalLM` knows, its logits, and a text that it
continues greedily; `python tests/golden/survey.py open FOLDER`, with the zoo, opens each and prints
a table: opened, how far the logits are from those of transformers, and how long the texts are the
same, or refused, and why. It ends with 1 if one is wrong. `survey.txt` has its table of all types.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    32: "d_model hidden_size n_embd d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim ffn_hidden_size "
    "intermediate_size n_inner word_embed_proj_dim",
    4: "decoder_layers encoder_layers n_layer n_layers num_hidden_layers num_layers rotary_dim "
    "decoder_attention_heads encoder_attention_heads n_head n_heads num_attention_heads "
    "num_experts num_heads num_local_experts n_routed_experts linear_num_value_heads",
    2: "linear_num_key_heads num_experts_per_tok num_key_value_heads moe_topk",
    8: "head_dim qk_nope_head_dim v_head_dim attention_head_size kv_lora_rank linear_key_head_dim "
    "linear_value_head_dim q_lora_rank qk_rope_head_dim moe_intermediate_size "
    "shared_expert_intermediate_size",
    64: "max_position_embeddings n_positions original_max_position_embeddings",
    53: "vocab_size",
}
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What these sizes ask for beside them.
OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "deepseek_v3": {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "modernbert-decoder": dict.fromkeys((*IDS, "cls_token_id", "sep_token_id"), 1),
    "roberta": {"pad_token_id": 1},
    "youtu": {"num_key_value_heads": 4},
}
LIMIT = 4_000_000  # parameters
PROMPT, NEW_TOKENS = 9, 55  # up to the models' longest text


def make(folder: Path) -> None:
    """Write the checkpoints; a type that these sizes do not fit says so."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for kind in sys.argv[3:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        try:
            known = CONFIG_MAPPING[kind]
            has = lambda x: not isinstance(getattr(known, x, property()), property)  # noqa: B023
            sizes = {x: n for n, names in SIZES.items() for x in names.split() if has(x)}
            config = known(**sizes | dict.fromkeys(IDS) | OTHERS.get(kind, {}))
            config.save_pretrained(folder / kind)
            with torch.device("meta"):
                count = sum(
                    x.numel() for x in AutoModelForCausalLM.from_config(config).parameters()
                )
            if count > LIMIT:
                raise ValueError(f"{count:,} parameters with these sizes")
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            draw(model, torch)
            model.save_pretrained(folder / kind)
            # A delta net makes much of small differences: of PyTorch's own in fp32, too. (Its
            # experts have no fp64.)
            is_delta = hasattr(config, "linear_num_key_heads") and not has("num_experts")
            model = model.double() if is_delta else model
            arrays = logits_of(model, torch) | continuation_of(model, torch)
            np.savez(folder / kind / "golden.npz", **arrays)
        except Exception as error:
            (folder / kind / "reason").write_text(f"{type(error).__name__}: {error}")
            if not (folder / kind / "config.json").exists():  # then its name alone is there to say
                (folder / kind / "config.json").write_text(json.dumps({"model_type": kind}))
        print(kind, flush=True)


def draw(model: Any, torch: Any) -> None:
    """Fill a model with random numbers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            noise = torch.randn(x.shape, generator=generator)
            x.copy_(x + 0.2 * noise if x.ndim < 2 else noise / math.sqrt(x.shape[-1]))


def logits_of(model: Any, torch: Any) -> dict[str, np.ndarray]:
    """Random tokens, and the model's logits for them."""
    with torch.no_grad():
        tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 53, (2, 19)))
        logits = model(input_ids=tokens).logits.float().numpy()
    return {"tokens": tokens.numpy().astype(np.int32), "logits": logits}


def continuation_of(model: Any, torch: Any) -> dict[str, np.ndarray]:
    """A prompt, and the tokens by which the model continues it greedily; none if it can't."""
    prompt = torch.from_numpy(np.random.default_rng(1).integers(3, 53, (1, PROMPT)))
    try:
        found = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    except Exception as error:
        print(f"no continuation: {type(error).__name__}: {error}"[:200])
        return {}
    return {"continued": found.numpy().astype(np.int32)}


def continued(model: Any, wanted: np.ndarray) -> tuple[int, float]:
    """How many new tokens are the same, and by what logits the first that differs does."""
    import jax.numpy as jnp

    import zoo

    prompt, count = wanted[:, :PROMPT], wanted.shape[1] - PROMPT
    found = zoo.generate(model, prompt, max_new_tokens=count, temperature=0.0, stop_tokens=())
    found = np.asarray(found)
    if np.array_equal(found, wanted):
        return count, 0.0
    place = int(np.argmax(found[0] != wanted[0]))
    logits = np.asarray(model(jnp.asarray(wanted[:, :place])))[0, -1]
    return place - PROMPT, float(logits.max() - logits[wanted[0, place]])


def check(folder: Path) -> str:
    """What becomes of one checkpoint: "opened …", "refused …", "WRONG …" or "not made …".

    A type that could not be made is refused by its name alone.
    """
    import jax.numpy as jnp

    import zoo
    from zoo.hf.model_types import MODEL_TYPES
    from zoo.publishing import PublishError, models

    is_made = not (folder / "reason").is_file()
    try:
        model = zoo.load(folder) if is_made else models.skeleton(folder, weights=False)
    except PublishError as error:
        text = str(error).replace(f"{folder}/config.json: ", "").replace(f"{folder}: ", "")
        if "known are " in text:
            text = text.partition(";")[0] + "; " + text.rpartition(". ")[2]
        has_text_part = folder.name in {family.within for family in MODEL_TYPES.values()}
        if is_made or not has_text_part:
            return "refused: " + " ".join(text.split())[:84]
    if not is_made:
        return "not made: " + (folder / "reason").read_text().splitlines()[0][:100]
    golden = np.load(folder / "golden.npz")
    got = np.asarray(model(jnp.asarray(golden["tokens"])))
    far = float(np.abs(got - golden["logits"]).max() / max(1.0, np.abs(golden["logits"]).max()))
    text = ""
    if far < 1e-4 and "continued" in golden and getattr(model.config, "causal", True):
        same, gap = continued(model, golden["continued"])
        text = f", {same} tokens alike" + (f", then a gap of {gap:.1e}" if gap else "")
        far = far if gap < 1e-3 else gap
    return f"{'opened' if far < 1e-4 else 'WRONG'}, {far:.1e}{text}"


def main() -> None:
    """As the docstring of the module says."""
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "make":
        make(folder)
        return
    found = {path.name: check(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    for kind, text in found.items():
        print(f"{kind:26} {text}")
    words = ("opened", "refused", "not made", "WRONG")
    count = {word: sum(text.startswith(word) for text in found.values()) for word in words}
    print(json.dumps(count))
    sys.exit(1 if count["WRONG"] else 0)


if __name__ == "__main__":
    main()
