"""Which of transformers' types of language models open here, and whether any of them opens wrongly.

`python tests/golden/survey.py make FOLDER [TYPE …]`, with PyTorch, transformers and PEFT, writes a
tiny random checkpoint of each type that `AutoModelForCausalLM` knows, its logits, the gradient of
its embedding, a text that it continues greedily, and adapters by PEFT with their logits. `open
FOLDER [TYPE …]`, with the zoo, opens each of them, or refuses it, and writes the adapters back;
`back FOLDER [TYPE …]`, with PEFT, reads these. `table FOLDER` prints what was found. It ends with 1
if one is wrong. `survey.txt` has its table of all types.
"""

import json
import math
import re
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
    "gemma3": {
        "vision_config": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    },
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "modernbert-decoder": dict.fromkeys((*IDS, "cls_token_id", "sep_token_id"), 1),
    "qwen3_5": {"vision_config": {"depth": 1, "hidden_size": 32, "out_hidden_size": 32}},
    "qwen3_5_moe": {"vision_config": {"depth": 1, "hidden_size": 32, "out_hidden_size": 32}},
    "roberta": {"pad_token_id": 1},
    "xlstm": {"hidden_size": 64, "num_heads": 2, "qk_dim_factor": 1.0, "chunk_size": 19}
    | {"chunkwise_kernel": "chunkwise--native_autograd", "mode": "train"}
    | {"sequence_kernel": "native_sequence__native", "step_kernel": "native"},
    "youtu": {"num_key_value_heads": 4},
}
# Of these the zoo refuses adapters on experts, by name.
WITHOUT_STACKS = ("gpt_oss", "granitemoe", "granitemoehybrid")
LIMIT = 4_000_000  # parameters
PROMPT, NEW_TOKENS = 9, 55  # up to the models' longest text
# The rest has adapters. PEFT refuses them on the last product of Mamba-2, and the zoo on Granite's
# shared experts, whose names in files are those of the experts too.
HEADS_AND_ROUTERS = ("lm_head", "embed_out", ".decoder", ".gate", ".router", "router.layer")
HEADS_AND_ROUTERS += ("expert_gate", "shared_mlp.input_linear", "shared_mlp.output_linear")


def make(folder: Path, kinds: list[str]) -> None:
    """Write the checkpoints; a type that these sizes do not fit says so."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        try:
            config = config_of(kind)
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
            model = precise(model)
            arrays = logits_of(model, torch) | continuation_of(model, torch)
            np.savez(folder / kind / "golden.npz", **arrays)
            adapt(model, folder / kind, torch)
        except Exception as error:
            made = (folder / kind / "golden.npz").exists()
            why = folder / kind / ("no_adapters" if made else "reason")
            why.write_text(f"{type(error).__name__}: {error}")
            if not (folder / kind / "config.json").exists():  # then its name alone is there to say
                (folder / kind / "config.json").write_text(json.dumps({"model_type": kind}))
        print(kind, flush=True)


def config_of(kind: str) -> Any:
    """A tiny configuration of a type; that of its text too, where it has others."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known, more = CONFIG_MAPPING[kind], OTHERS.get(kind, {})

    def sized(known: Any) -> dict[str, Any]:
        has = lambda x: not isinstance(getattr(known, x, property()), property)
        return {x: n for n, names in SIZES.items() for x in names.split() if has(x)}

    if "vision_config" in more:
        text = sized(known.sub_configs["text_config"]) | dict.fromkeys(IDS)
        return known(text_config=text, **more)
    return known(**sized(known) | dict.fromkeys(IDS) | more)


def precise(model: Any) -> Any:
    """The same model; in fp64 a delta net, which makes much of small differences: of PyTorch's own
    in fp32, too. (Its experts have no fp64.)"""
    config = model.config.get_text_config()
    is_delta = hasattr(config, "linear_num_key_heads") and not hasattr(config, "num_experts")
    return model.double() if is_delta else model


def draw(model: Any, torch: Any) -> None:
    """Fill a model with random numbers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            noise = torch.randn(x.shape, generator=generator)
            x.copy_(x + 0.2 * noise if x.ndim < 2 else noise / math.sqrt(x.shape[-1]))


def logits_of(model: Any, torch: Any) -> dict[str, np.ndarray]:
    """Random tokens, the model's logits for them, and the gradient of its embedding: of their sum,
    each times a number that `gradient_of` draws too."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 53, (2, 19)))
    logits = model(input_ids=tokens).logits
    weights = np.random.default_rng(1).normal(size=tuple(logits.shape))
    table = model.get_input_embeddings().weight
    try:
        (logits * torch.from_numpy(weights)).sum().backward()
    except RuntimeError as error:
        print(f"no gradient: {error}"[:200])
        table.grad = torch.full_like(table, math.nan)
    arrays = {"logits": logits.detach(), "gradient": table.grad}
    return {"tokens": tokens.numpy().astype(np.int32)} | {
        name: x.float().numpy() for name, x in arrays.items()
    }


def adapt(model: Any, folder: Path, torch: Any) -> None:
    """Write adapters by PEFT on all linear layers, and on experts that are stacked; with logits."""
    import peft

    model.config._name_or_path = str(folder)
    no_linear = (*HEADS_AND_ROUTERS, *["out_proj"] * (model.config.model_type == "mamba2"))
    modules = [
        name
        for name, x in model.named_modules()
        if (isinstance(x, torch.nn.Linear) or type(x).__name__ == "Conv1D")
        and not name.endswith(no_linear)
        and not re.search("vision|multi_modal", name)
    ]
    names = [name for name, _ in model.named_parameters()]
    stacks = {x for x in ("gate_up_proj", "down_proj") for y in names if y.endswith(f"experts.{x}")}
    if model.config.model_type in WITHOUT_STACKS:
        stacks = set()
    if stacks:  # PEFT takes the names of other MLPs for theirs
        modules = [x for x in modules if not re.search("(gate|up|down)_proj$", x)]
    options = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=modules,
        target_parameters=sorted(f"mlp.experts.{x}" for x in stacks) or None,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model.float(), options).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, x in adapted.named_parameters():
            if "lora_B" in path:
                x.copy_(0.2 * torch.randn(x.shape, generator=generator))
    adapted.save_pretrained(folder / "adapters")
    np.savez(folder / "adapters" / "golden.npz", **adapted_logits(precise(adapted), folder, torch))


def adapted_logits(model: Any, folder: Path, torch: Any) -> dict[str, np.ndarray]:
    """The logits of the checkpoint's tokens."""
    tokens = torch.from_numpy(np.load(folder / "golden.npz")["tokens"].astype(np.int64))
    with torch.no_grad():
        return {"logits": model(input_ids=tokens).logits.float().numpy()}


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


def gradient_of(model: Any, golden: Any) -> Any:
    """The gradient of the embedding, as `logits_of` has it."""
    import equinox as eqx
    import jax.numpy as jnp

    weights = np.random.default_rng(1).normal(size=golden["logits"].shape)
    total = lambda model: (model(golden["tokens"]) * jnp.asarray(weights, jnp.float32)).sum()
    return eqx.filter_grad(total)(model).embedding.weight


def far(got: Any, want: np.ndarray, least: float) -> float:
    """The largest difference, as a share of the largest number, or of `least` if that is more."""
    return float(np.abs(np.asarray(got) - want).max() / max(least, np.abs(want).max()))


def check(folder: Path) -> dict[str, Any]:
    """What becomes of one checkpoint, by the table's columns.

    A type that could not be made is refused by its name alone.
    """
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
            return {"refused": " ".join(text.split())[:84]}
    if not is_made:
        return {"not made": (folder / "reason").read_text().splitlines()[0][:100]}
    golden = np.load(folder / "golden.npz")
    row = {"logits": far(model(golden["tokens"]), golden["logits"], 1.0)}
    if np.isfinite(golden["gradient"]).all():
        row["gradient"] = far(gradient_of(model, golden), golden["gradient"], 0.0)
    if "continued" in golden and getattr(model.config, "causal", True):
        row["tokens"], row["gap"] = continued(model, golden["continued"])
    row["export"] = exported(model, folder)
    return row | adapters(model, folder)


def exported(model: Any, folder: Path) -> str:
    """Whether what the zoo writes has the bits of what transformers wrote."""
    import safetensors.numpy

    import zoo

    zoo.save(folder / "export", model, format="hf", like=folder)
    # The language model of one that has others goes out alone.
    short = lambda name: name.replace("language_model.", "").removeprefix("model.")
    want, got = (
        {
            short(name): x
            for path in where.glob("*.safetensors")
            for name, x in safetensors.numpy.load_file(path).items()
        }
        for where in (folder, folder / "export")
    )
    left_out = sorted(want.keys() - got.keys())
    if folder.name == "olmo_hybrid":  # transformers 5 writes others, and reads both
        return "published names"
    if got.keys() - want.keys():
        return f"other names: {sorted(got.keys() - want.keys())[0]}"
    differs = [x for x in got if got[x].tobytes() != want[x].tobytes()]
    if differs:
        return f"differs: {differs[0]}"
    return f"equal but for {len(left_out)} left out" if left_out else "equal"


def adapters(model: Any, folder: Path) -> dict[str, Any]:
    """How far the logits under PEFT's adapters are from PEFT's; and they are written back."""
    import zoo
    from zoo.publishing import PublishError

    if (folder / "no_adapters").is_file():
        return {"adapters": (folder / "no_adapters").read_text().splitlines()[0][:100]}
    golden = np.load(folder / "golden.npz"), np.load(folder / "adapters" / "golden.npz")
    try:
        adapted = zoo.load_adapters(folder / "adapters", model)
        zoo.save_adapters(folder / "back", adapted, base=str(folder))
    except PublishError as error:
        return {"adapters": " ".join(str(error).partition(": ")[2].split())[:160]}
    effect = float(np.abs(golden[1]["logits"] - golden[0]["logits"]).max())
    assert effect > 0.1, effect
    return {"adapters": far(adapted(golden[0]["tokens"]), golden[1]["logits"], 1.0)}


def read_back(folder: Path) -> dict[str, Any]:
    """How far PEFT's logits under the adapters that the zoo wrote are from its own, over the base
    that the zoo wrote."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    if not (folder / "back").is_dir():
        return {}
    model = AutoModelForCausalLM.from_pretrained(folder / "export", attn_implementation="eager")
    adapted = precise(peft.PeftModel.from_pretrained(model, folder / "back").eval())
    want = np.load(folder / "adapters" / "golden.npz")["logits"]
    return {"back": far(adapted_logits(adapted, folder, torch)["logits"], want, 1.0)}


def told(row: dict[str, Any]) -> str:
    """A row of the table: "opened …", "refused …", "WRONG …" or "not made …"."""
    for word in ("refused", "not made"):
        if word in row:
            return f"{word}: {row[word]}"
    numbers = [row[x] for x in ("logits", "gradient", "adapters", "back") if x in row]
    is_right = all(x < 1e-4 for x in numbers if isinstance(x, float)) and row.get("gap", 0) < 1e-3
    is_right &= row["export"].startswith(("equal", "published names"))
    shown = [
        row.get(x, "-") for x in ("logits", "gradient", "tokens", "export", "adapters", "back")
    ]
    words = [f"{x:.1e}" if isinstance(x, float) else str(x) for x in shown]
    gap = [f"a gap of {row['gap']:.1e}"] if row.get("gap") else []
    return ", ".join(["opened" if is_right else "WRONG", *words, *gap])


def main() -> None:
    """As the docstring of the module says."""
    action, folder, *kinds = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    if action == "make":
        make(folder, kinds)
        return
    places = [folder / x for x in kinds] or sorted(x for x in folder.iterdir() if x.is_dir())
    if action in ("open", "back"):
        for place in places:
            path = place / "row.json"
            row = json.loads(path.read_text()) if action == "back" else {}
            try:
                row |= check(place) if action == "open" else read_back(place)
            except Exception as error:
                row |= {"logits": math.nan, "error": f"{type(error).__name__}: {error}"[:300]}
            path.write_text(json.dumps(row))
            print(place.name, row, flush=True)
        return
    rows = {x.name: told(json.loads((x / "row.json").read_text())) for x in places}
    print(f"{'type':26} logits, gradient, continuation, export, PEFT's adapters here, ours in PEFT")
    for kind, text in rows.items():
        print(f"{kind:26} {text}")
    words = ("opened", "refused", "not made", "WRONG")
    count = {word: sum(text.startswith(word) for text in rows.values()) for word in words}
    print(json.dumps(count))
    sys.exit(1 if count["WRONG"] else 0)


if __name__ == "__main__":
    main()
