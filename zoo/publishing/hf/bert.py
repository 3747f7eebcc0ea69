"""BERT and similar encoders, such as MiniLM, without a language-modelling head."""

import dataclasses
from collections.abc import Collection

from zoo import bert
from zoo.publishing.hf.canonical import of_bert
from zoo.publishing.hf.family import Choice, Family, Fixed, Same, words
from zoo.publishing.hf.names import Tensor

LAYER = "{prefix}encoder.layer.{layer}."
EMBEDDINGS = "{prefix}embeddings."


def _tensors(config: bert.Config) -> dict[str, Tensor]:
    found = {
        "embedding.weight": Tensor(EMBEDDINGS + "word_embeddings.weight"),
        "position_embedding.weight": Tensor(EMBEDDINGS + "position_embeddings.weight"),
        "type_embedding.weight": Tensor(EMBEDDINGS + "token_type_embeddings.weight"),
    }
    for name, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        heads = "heads" if name == "q" else "kv_heads"
        part = f"{LAYER}attention.self.{theirs}."
        found[f"blocks.attention.w{name}"] = Tensor(part + "weight", f"{heads}.head_dim embed")
        found[f"blocks.attention.b{name}"] = Tensor(part + "bias", f"{heads}.head_dim")
    part = LAYER + "attention.output.dense."
    found["blocks.attention.wo"] = Tensor(part + "weight", "embed heads.head_dim")
    found["blocks.attention.bo"] = Tensor(part + "bias")
    for name, theirs, axes in (
        ("up", "intermediate", "mlp embed"),
        ("down", "output", "embed mlp"),
    ):
        found[f"blocks.mlp.w_{name}"] = Tensor(f"{LAYER}{theirs}.dense.weight", axes)
        found[f"blocks.mlp.b_{name}"] = Tensor(f"{LAYER}{theirs}.dense.bias")
    norms = {
        "embedding_norm": EMBEDDINGS + "LayerNorm",
        "blocks.attention_norm": LAYER + "attention.output.LayerNorm",
        "blocks.mlp_norm": LAYER + "output.LayerNorm",
    }
    for ours, theirs in norms.items():
        found[f"{ours}.scale"] = Tensor(f"{theirs}.weight")
        found[f"{ours}.bias"] = Tensor(f"{theirs}.bias")
    if config.pooler:
        found["pooler.weight"] = Tensor("{prefix}pooler.dense.weight", "features embed")
        found["pooler.bias"] = Tensor("{prefix}pooler.dense.bias")
    return found


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
    canonical=of_bert,
    tensors=_tensors,
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
