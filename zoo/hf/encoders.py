"""The model types of encoders of text: BERT, RoBERTa, DistilBERT, ESM-2 and ModernBERT."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from zoo import transformer
from zoo.hf.family import Family, canonical
from zoo.hf.gpts import GELUS
from zoo.hf.heads import SEQUENCES, TOKENS, head_at
from zoo.hf.layouts import table
from zoo.hf.rotary import Rotary
from zoo.hf.rules import Choice, Computed, Each, Fields, Fixed, LayerTypes, Rule, Same, same, words


@dataclass(frozen=True)
class OffsetPositions(Rule):
    """RoBERTa's: positions begin behind the table's row of the padding's id."""

    def read(self, fields: Fields) -> dict[str, Any]:
        padding, rows = fields.take("pad_token_id", 1), fields.take("max_position_embeddings", 512)
        if not isinstance(padding, int) or padding < 0:
            raise fields.refusal(f"pad_token_id={padding!r}: the first position is behind that row")
        return {"max_seq_len": rows - padding - 1, "encoder.position_offset": padding + 1}

    def write(self, config: Any) -> dict[str, Any]:
        offset = config.encoder.position_offset
        return {"pad_token_id": offset - 1, "max_position_embeddings": config.max_seq_len + offset}


@dataclass(frozen=True)
class TokenDropout(Rule):
    """ESM-2's: masks have an embedding of zero, and the other tokens are scaled up."""

    def read(self, fields: Fields) -> dict[str, Any]:
        mask, used = fields.take("mask_token_id", None), fields.take("token_dropout", False)
        if used and mask is None:
            raise fields.refusal("token_dropout=True: needs a mask_token_id")
        return {"encoder.mask_id": mask if used else None}

    def write(self, config: Any) -> dict[str, Any]:
        mask = config.encoder.mask_id
        return {"token_dropout": mask is not None, "mask_token_id": mask}


@dataclass(frozen=True)
class TwoSidedWindow(LayerTypes):
    """ModernBERT's: `local_attention` is how many positions a token sees to both sides."""

    def read(self, fields: Fields) -> dict[str, Any]:
        both = fields.take("local_attention", 128)
        period = fields.take("global_attn_every_n_layers", 3)
        if not isinstance(both, int) or not isinstance(period, int) or period < 1:
            raise fields.refusal(
                f"local_attention={both!r}, global_attn_every_n_layers={period!r}: must be numbers"
            )
        types = fields.values.get("layer_types")
        if types is None:
            kinds = ("full_attention", *["sliding_attention"] * (period - 1))
            count = fields.values.get("num_hidden_layers", 0)
            types = [kinds[i % period] for i in range(min(count, 4096))]
        fields.take("layer_types", None)
        inner = Fields({**fields.values, "layer_types": types}, "")
        return {**super().read(inner), "attention.window": both // 2 + 1}

    def write(self, config: Any) -> dict[str, Any]:
        types = super().write(config)["layer_types"]
        # Without a window anywhere the width is of no effect.
        return {"layer_types": types, "local_attention": 2 * ((config.attention.window or 65) - 1)}


# Whether the output head is the embedding; a model without a head says nothing on it.
TIED = Computed(
    "tie_word_embeddings",
    True,
    lambda tied, _: {"tie_embeddings": tied},
    lambda config: config.tie_embeddings or config.encoder.head == "none",
)
SIZES = (
    *same(
        """vocab_size=vocab_size hidden_size=d_model num_hidden_layers=num_layers
        num_attention_heads=num_heads intermediate_size=d_ff"""
    ),
    TIED,
)
# Of all heads but those of decoders: a layer, a norm, and the embedding with a bias.
ENCODER = {
    "causal": False,
    "residual.norm": "layer",
    "encoder.embedding_norm": True,
    "encoder.head": "transformed",
    "head_bias": True,
}
NO_DECODER = (Fixed("is_decoder", False), Fixed("add_cross_attention", False))
encoder = partial(
    Family, model=transformer.Transformer, config=transformer.Config, canonical=canonical
)


def layers(names: str) -> str:
    """The places of a layer's parameters, by the modules of its parts.

    Those are queries, keys, values, the output and the norm of attention, and the two of the MLP.
    """
    query, key, value, out, norm, up, down = names.split()
    return f"""
    blocks.attention.wq  {query}.*
    blocks.attention.wk  {key}.*
    blocks.attention.wv  {value}.*
    blocks.attention.wo  {out}.*
    blocks.mlp.w_up      {up}.*
    blocks.mlp.w_down    {down}.*
    blocks.attention_out_norm.scale  {norm}.*
    """


def _head(dense: str, norm: str, decoder: str, bias: str) -> str:
    """The places of the output head's parameters."""
    return f"""
    transform.dense.weight  {dense}.*
    transform.norm.scale    {norm}.*
    head.weight             {decoder}.weight
    head.bias               {bias}
    tied_bias               {bias}
    """


_OF_BERT = layers(
    "attention.self.query attention.self.key attention.self.value attention.output.dense "
    "attention.output.LayerNorm intermediate.dense output.dense"
)
_EMBEDDINGS = """
    embedding.weight           {prefix}embeddings.word_embeddings.weight
    position_embedding.weight  {prefix}embeddings.position_embeddings.weight
    type_embedding.weight      {prefix}embeddings.token_type_embeddings.weight
    embedding_norm.scale       {prefix}embeddings.LayerNorm.*
"""
_BERT = f"""{_EMBEDDINGS}{_OF_BERT}
    pooler.weight              {{prefix}}pooler.dense.*
    blocks.mlp_out_norm.scale  output.LayerNorm.*
"""
_IN_BERT = "{prefix}encoder.layer.{layer}."
STREAM = {
    **ENCODER,
    "bias": True,
    "residual.norm_placement": "stream",
    "residual.final_norm": False,
    "positions.kind": "learned",
}
OF_TOKENS = {TOKENS: head_at("none", "classifier")}
_WITH_POOLER = {
    SEQUENCES: head_at("pooler", "classifier.out_proj", pooler="classifier.dense"),
    **OF_TOKENS,
}
# Fields of a pooler that transformers does not have.
_UNUSED = words(
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
    "pooler_size_per_head pooler_type"
)
BERT = encoder(
    model_type="bert",
    architecture="BertForMaskedLM",
    bare="BertModel",
    of_head="cls.predictions.",
    rules=(
        *SIZES,
        Same("max_position_embeddings", "max_seq_len", 512),
        Same("type_vocab_size", "encoder.num_token_types", 2),
        Same("layer_norm_eps", "residual.norm_eps", 1e-12),
        Choice("hidden_act", "mlp", GELUS, "gelu"),
        *NO_DECODER,
        Fixed("position_embedding_type", "absolute"),
    ),
    always=STREAM,
    tensors=table(
        _BERT
        + _head(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
            "cls.predictions.bias",
        ),
        layer=_IN_BERT,
    ),
    prefixes=("bert.", ""),
    marker="{prefix}embeddings.word_embeddings.weight",
    ignored=_UNUSED,
    buffers=("embeddings.position_ids",),
    copies={
        "cls.predictions.decoder.weight": "{prefix}embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    left_out={"cls.seq_relationship.": "a head that tells whether sentences follow each other"},
    heads={SEQUENCES: head_at("pooler", "classifier"), **OF_TOKENS},
)
_LM_HEAD = _head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
_LM_COPIES = {
    "lm_head.decoder.weight": "{prefix}embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
ROBERTA = replace(
    BERT,
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    bare="RobertaModel",
    of_head="lm_head.",
    rules=(
        *SIZES,
        OffsetPositions(),
        *same("type_vocab_size=encoder.num_token_types:2 layer_norm_eps=residual.norm_eps:1e-12"),
        Choice("hidden_act", "mlp", {"gelu": "gelu_erf"}, "gelu"),  # the head's too
        *NO_DECODER,
        Fixed("position_embedding_type", "absolute"),
    ),
    tensors=table(_BERT + _LM_HEAD, layer=_IN_BERT),
    prefixes=("roberta.", ""),
    ignored=frozenset(),
    copies=_LM_COPIES,
    left_out={},
    heads=_WITH_POOLER,
)
DISTILBERT = encoder(
    model_type="distilbert",
    architecture="DistilBertForMaskedLM",
    bare="DistilBertModel",
    of_head="vocab_",
    rules=(
        *same(
            """vocab_size=vocab_size:30522 dim=d_model:768 n_layers=num_layers:6
            n_heads=num_heads:12 hidden_dim=d_ff:3072
            max_position_embeddings=max_seq_len:512"""
        ),
        Choice("activation", "mlp", {"gelu": "gelu_erf", "relu": "relu"}, "gelu"),
        TIED,
    ),
    always={**STREAM, "residual.norm_eps": 1e-12},
    tensors=table(
        _EMBEDDINGS
        + layers(
            "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm "
            "ffn.lin1 ffn.lin2"
        )
        + "blocks.mlp_out_norm.scale  output_layer_norm.*"
        + _head("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
        layer="{prefix}transformer.layer.{layer}.",
    ),
    prefixes=("distilbert.", ""),
    marker="{prefix}embeddings.word_embeddings.weight",
    # How the table of positions begins, and rates of dropout.
    ignored=words("sinusoidal_pos_embds dropout attention_dropout qa_dropout seq_classif_dropout"),
    copies={"vocab_projector.weight": "{prefix}embeddings.word_embeddings.weight"},
    heads=OF_TOKENS,  # the other's pooler has a ReLU
)
ESM = encoder(
    model_type="esm",
    architecture="EsmForMaskedLM",
    bare="EsmModel",
    of_head="lm_head.",
    rules=(
        *SIZES,
        Rotary(max_seq_len=1026),
        Same("layer_norm_eps", "residual.norm_eps", 1e-12),
        Choice(
            "emb_layer_norm_before",
            "encoder.embedding_norm",
            {False: False, True: True, None: False},
            None,
        ),
        TokenDropout(),
        # ESM's code asks for it; a tokenizer's own takes its place.
        Computed("pad_token_id", None, lambda *_: {}, lambda _: 1),
        Choice("hidden_act", "mlp", {"gelu": "gelu_erf"}, "gelu"),
        *NO_DECODER,
        Choice("position_embedding_type", "positions.kind", {"rotary": "rotary"}, "absolute"),
        Fixed("is_folding_model", False),
    ),
    always={**ENCODER, "bias": True},
    tensors=table(
        f"""{_OF_BERT}{_LM_HEAD}
        embedding.weight             {{prefix}}embeddings.word_embeddings.weight
        embedding_norm.scale         {{prefix}}embeddings.layer_norm.*
        final_norm.scale             {{prefix}}encoder.emb_layer_norm_after.*
        pooler.weight                {{prefix}}pooler.dense.*
        blocks.attention_norm.scale  attention.LayerNorm.*
        blocks.mlp_norm.scale        LayerNorm.*
        """,
        layer=_IN_BERT,
    ),
    prefixes=("esm.", ""),
    marker="{prefix}embeddings.word_embeddings.weight",
    ignored=words("esmfold_config vocab_list"),
    # A table that rotary positions leave unused is in older files.
    buffers=("position_ids", "rotary_embeddings.inv_freq", "position_embeddings.weight"),
    copies=_LM_COPIES,
    left_out=dict.fromkeys(
        ("esm.contact_head.", "contact_head."), "a regression of contacts on attention"
    ),
    heads=_WITH_POOLER,
)
MODERNBERT = encoder(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    bare="ModernBertModel",
    of_head="head.norm.",
    rules=(
        *SIZES,
        Rotary(
            theta=160_000.0,
            local=10_000.0,
            max_seq_len=8192,
            theta_name="global_rope_theta",
            local_name="local_rope_theta",
        ),
        TwoSidedWindow(period=None),
        *same("norm_eps=residual.norm_eps:1e-5 norm_bias=residual.norm_bias:False"),
        Each("attention_bias", "attention.qkv_bias attention.out_bias", False),
        Fixed("mlp_bias", False),
        *same("decoder_bias=head_bias:True classifier_bias=encoder.transform_bias:False"),
        Choice("hidden_activation", "mlp", {"gelu": "geglu_erf"}, "gelu"),
        Fixed("classifier_activation", "gelu"),
    ),
    always={**ENCODER, "encoder.first_norm": False},
    tensors=table(
        """
        embedding.weight               {prefix}embeddings.tok_embeddings.weight
        embedding_norm.scale           {prefix}embeddings.norm.*
        final_norm.scale               {prefix}final_norm.*
        blocks.attention_norm.scale    attn_norm.*
        blocks.attention.{wq,wk,wv}    attn.Wqkv.*    /
        blocks.attention.wo            attn.Wo.*
        blocks.mlp_norm.scale          mlp_norm.*
        blocks.mlp.{w_gate,w_up}       mlp.Wi.weight  /
        blocks.mlp.w_down              mlp.Wo.weight
        """
        + _head("head.dense", "head.norm", "decoder", "decoder.bias"),
        layer="{prefix}layers.{layer}.",
    ),
    prefixes=("model.", ""),
    marker="{prefix}embeddings.tok_embeddings.weight",
    # Rates and starts of training, heads that are not these, and how products are computed.
    ignored=words(
        "classifier_pooling cls_token_id deterministic_flash_attn embedding_dropout "
        "initializer_cutoff_factor mlp_dropout reference_compile repad_logits_with_grad "
        "sparse_pred_ignore_index sparse_prediction"
    ),
    copies={"decoder.weight": "{prefix}embeddings.tok_embeddings.weight"},
)
