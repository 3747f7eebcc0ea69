"""GPT-2: weights as [in, out]; queries, keys and values side by side in one tensor."""

from zoo import transformer
from zoo.publishing.hf.canonical import of_transformer
from zoo.publishing.hf.family import Choice, Family, Fixed, Same, words
from zoo.publishing.hf.names import Tensor

LAYER = "{prefix}h.{layer}."


def _tensors(config: transformer.Config) -> dict[str, Tensor]:
    found = {
        "embedding.weight": Tensor("{prefix}wte.weight"),
        "position_embedding.weight": Tensor("{prefix}wpe.weight"),
        "blocks.attention.wo": Tensor(LAYER + "attn.c_proj.weight", "heads.head_dim embed"),
        "blocks.attention.bo": Tensor(LAYER + "attn.c_proj.bias"),
        "blocks.mlp.w_up": Tensor(LAYER + "mlp.c_fc.weight"),
        "blocks.mlp.b_up": Tensor(LAYER + "mlp.c_fc.bias"),
        "blocks.mlp.w_down": Tensor(LAYER + "mlp.c_proj.weight"),
        "blocks.mlp.b_down": Tensor(LAYER + "mlp.c_proj.bias"),
    }
    for i, (name, heads) in enumerate((("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))):
        weight, bias = LAYER + "attn.c_attn.weight", LAYER + "attn.c_attn.bias"
        axes = f"part.{heads}.head_dim"
        found[f"blocks.attention.w{name}"] = Tensor(weight, f"embed {axes}", (i, 3))
        found[f"blocks.attention.b{name}"] = Tensor(bias, axes, (i, 3))
    norms = {
        "blocks.attention_norm": LAYER + "ln_1",
        "blocks.mlp_norm": LAYER + "ln_2",
        "final_norm": "{prefix}ln_f",
    }
    for ours, theirs in norms.items():
        found[f"{ours}.scale"] = Tensor(f"{theirs}.weight")
        found[f"{ours}.bias"] = Tensor(f"{theirs}.bias")
    if not config.tie_embeddings:
        found["head.weight"] = Tensor("lm_head.weight", "vocab embed")
    return found


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    model=transformer.Transformer,
    config=transformer.Config,
    rules=(
        Same("vocab_size", "vocab_size"),
        Same("n_embd", "d_model"),
        Same("n_layer", "num_layers"),
        Same("n_head", "num_heads"),
        Same("n_inner", "d_ff", None),
        Same("n_positions", "max_seq_len", 1024),
        Same("layer_norm_epsilon", "residual.norm_eps", 1e-5),
        Same("tie_word_embeddings", "tie_embeddings", True),
        Choice(
            "activation_function",
            "mlp",
            {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"},
            "gelu_new",
        ),
        Fixed("scale_attn_weights", True),
        Fixed("scale_attn_by_inverse_layer_idx", False),
        Fixed("add_cross_attention", False),
    ),
    always={"residual.norm": "layer", "positions.kind": "learned", "bias": True},
    canonical=of_transformer,
    tensors=_tensors,
    prefixes=("transformer.", ""),
    marker="{prefix}wte.weight",
    # The length a second time, a matter of precision, and fields of a head that is not used.
    ignored=words(
        "n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout "
        "summary_proj_to_labels summary_type summary_use_proj"
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),
)
