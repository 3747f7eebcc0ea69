"""GPT-2, with weights as [in, out] and queries, keys and values side by side; BERT, headless."""

import dataclasses
from collections.abc import Collection

from zoo import bert, transformer
from zoo.hf.family import Choice, Family, Fixed, Same, words
from zoo.hf.names import Tensor
from zoo.hf.rules import canonical

_GPT2_LAYER = "{prefix}h.{layer}."


def _gpt2_tensors(config: transformer.Config) -> dict[str, Tensor]:
    found = {
        "embedding.weight": Tensor("{prefix}wte.weight"),
        "position_embedding.weight": Tensor("{prefix}wpe.weight"),
        "blocks.attention.wo": Tensor(_GPT2_LAYER + "attn.c_proj.weight", "heads.head_dim embed"),
        "blocks.attention.bo": Tensor(_GPT2_LAYER + "attn.c_proj.bias"),
        "blocks.mlp.w_up": Tensor(_GPT2_LAYER + "mlp.c_fc.weight"),
        "blocks.mlp.b_up": Tensor(_GPT2_LAYER + "mlp.c_fc.bias"),
        "blocks.mlp.w_down": Tensor(_GPT2_LAYER + "mlp.c_proj.weight"),
        "blocks.mlp.b_down": Tensor(_GPT2_LAYER + "mlp.c_proj.bias"),
    }
    for i, (name, heads) in enumerate((("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))):
        weight, bias = _GPT2_LAYER + "attn.c_attn.weight", _GPT2_LAYER + "attn.c_attn.bias"
        axes = f"part.{heads}.head_dim"
        found[f"blocks.attention.w{name}"] = Tensor(weight, f"embed {axes}", (i, 3))
        found[f"blocks.attention.b{name}"] = Tensor(bias, axes, (i, 3))
    norms = {
        "blocks.attention_norm": _GPT2_LAYER + "ln_1",
        "blocks.mlp_norm": _GPT2_LAYER + "ln_2",
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
    canonical=canonical,
    tensors=_gpt2_tensors,
    prefixes=("transformer.", ""),
    marker="{prefix}wte.weight",
    # The length a second time, a matter of precision, and fields of a head that is not used.
    ignored=words(
        "n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout "
        "summary_proj_to_labels summary_type summary_use_proj"
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),
)

_BERT_LAYER = "{prefix}encoder.layer.{layer}."
_EMBEDDINGS = "{prefix}embeddings."


def _bert_tensors(config: bert.Config) -> dict[str, Tensor]:
    found = {
        "embedding.weight": Tensor(_EMBEDDINGS + "word_embeddings.weight"),
        "position_embedding.weight": Tensor(_EMBEDDINGS + "position_embeddings.weight"),
        "type_embedding.weight": Tensor(_EMBEDDINGS + "token_type_embeddings.weight"),
    }
    for name, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        heads = "heads" if name == "q" else "kv_heads"
        part = f"{_BERT_LAYER}attention.self.{theirs}."
        found[f"blocks.attention.w{name}"] = Tensor(part + "weight", f"{heads}.head_dim embed")
        found[f"blocks.attention.b{name}"] = Tensor(part + "bias", f"{heads}.head_dim")
    part = _BERT_LAYER + "attention.output.dense."
    found["blocks.attention.wo"] = Tensor(part + "weight", "embed heads.head_dim")
    found["blocks.attention.bo"] = Tensor(part + "bias")
    for name, theirs, axes in (
        ("up", "intermediate", "mlp embed"),
        ("down", "output", "embed mlp"),
    ):
        found[f"blocks.mlp.w_{name}"] = Tensor(f"{_BERT_LAYER}{theirs}.dense.weight", axes)
        found[f"blocks.mlp.b_{name}"] = Tensor(f"{_BERT_LAYER}{theirs}.dense.bias")
    norms = {
        "embedding_norm": _EMBEDDINGS + "LayerNorm",
        "blocks.attention_norm": _BERT_LAYER + "attention.output.LayerNorm",
        "blocks.mlp_norm": _BERT_LAYER + "output.LayerNorm",
    }
    for ours, theirs in norms.items():
        found[f"{ours}.scale"] = Tensor(f"{theirs}.weight")
        found[f"{ours}.bias"] = Tensor(f"{theirs}.bias")
    if config.pooler:
        found["pooler.weight"] = Tensor("{prefix}pooler.dense.weight", "features embed")
        found["pooler.bias"] = Tensor("{prefix}pooler.dense.bias")
    return found


def _with_sizes(config: bert.Config) -> bert.Config:
    """The canonical form: derived sizes filled in."""
    return dataclasses.replace(config, d_ff=config.parts.hidden_size)


def _with_pooler(config: bert.Config, names: Collection[str]) -> bert.Config:
    """Hugging Face's configuration does not tell whether there is a pooler; the tensors do."""
    return dataclasses.replace(config, pooler=any("pooler." in name for name in names))


BERT = Family(
    model_type="bert",
    architecture="BertModel",
    model=bert.BERT,
    config=bert.Config,
    rules=(
        Same("vocab_size", "vocab_size"),
        Same("hidden_size", "d_model"),
        Same("num_hidden_layers", "num_layers"),
        Same("num_attention_heads", "num_heads"),
        Same("intermediate_size", "d_ff"),
        Same("max_position_embeddings", "max_seq_len", 512),
        Same("type_vocab_size", "num_token_types", 2),
        Same("layer_norm_eps", "norm_eps", 1e-12),
        Choice(
            "hidden_act",
            "mlp",
            {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"},
            "gelu",
        ),
        Fixed("is_decoder", False),
        Fixed("add_cross_attention", False),
        Fixed("position_embedding_type", "absolute"),
    ),
    canonical=_with_sizes,
    tensors=_bert_tensors,
    prefixes=("", "bert."),
    marker="{prefix}embeddings.word_embeddings.weight",
    # Fields of a head that these models lack, and of a pooler that transformers does not have.
    ignored=words(
        "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
        "pooler_size_per_head pooler_type tie_word_embeddings"
    ),
    buffers=("embeddings.position_ids",),
    adapt=_with_pooler,
)
