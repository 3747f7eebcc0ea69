"""zoo.hf, the folder: configurations, damage and refusals, shardings, memory, saving, the hub."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers import arrays, as_subclass, assert_same, drawn_transformer, with_loud_mlp
from model_folders import FetchedSizes
from test_hf import CASES, GOLDEN, tensors

import zoo
from zoo import hf, sharding, transformer
from zoo.common import configuration
from zoo.data import tokenizer
from zoo.hf.model_types import MODEL_TYPES
from zoo.hf.rules import Fixed
from zoo.publishing import PublishError, families, models
from zoo.transformer.rotary import RopeScaling

TYPES = {x: json.loads((GOLDEN / x / "config.json").read_text())["model_type"] for x in CASES}


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; a field that becomes ... is left out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: x for name, x in values.items() if x is not ...}))


def refusal(folder: Path | str, **options: Any) -> str:
    with pytest.raises(PublishError) as error:
        zoo.load(folder, **options)
    return str(error.value)


# Configurations


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3", {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16}}),
        ("llama_linear", {"rope_parameters": ..., "rope_theta": 10000,
                          "rope_scaling": {"type": "linear", "factor": 4}}),
        ("llama2", {"rope_parameters": ..., "rope_theta": ..., "head_dim": ...,
                    "num_key_value_heads": ..., "mlp_bias": ..., "torch_dtype": "float32"}),
        ("gemma3", {"rope_parameters": ..., "rope_theta": 1000.0, "rope_local_base_freq": 100.0,
                    "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "layer_types": ...,
                    "sliding_window_pattern": 3, "tie_word_embeddings": ...}),
        ("gemma2", {"layer_types": ..., "tie_word_embeddings": ..., "rope_parameters": ...,
                    "hidden_act": "gelu_pytorch_tanh"}),
        ("qwen2_windows", {"layer_types": ...}),
        ("qwen3_moe", {"num_local_experts": ..., "num_experts": 6}),
        ("gpt2", {"n_ctx": 64, "activation_function": ..., "task_specific_params": {}}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_older_config_spellings_are_read(name: str, changes: dict, copy: Any):
    folder = copy(name)
    want = models.skeleton(folder).config
    edit(folder, **changes)
    assert models.skeleton(folder).config == want


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama2", {"model_type": "mamba"}, r"'mamba' is unknown; .* llama, .*CONTRIBUTING"),
        ("llama2", {"model_type": "paligemma", "text_config": {"model_type": "gemma3_text"}},
         r"language model .* gemma3_text"),
        ("llama2", {"model_type": ...},
         r"format .* installed: zoo, hf"),
        ("llama2", {"model_type": ["llama"]}, r"model_type \['llama'\] is unknown"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts=None:"),
        ("llama2", {"attention_sinks": 4}, "attention_sinks=4"),
        ("llama2", {"quantization_config": {}}, "quant_method=None"),
        ("llama2", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("llama2", {"hidden_size": ...}, "has no field hidden_size"),
        ("llama2", {"num_attention_heads": 5}, r"num_kv_heads=4 .* num_heads=5"),
        ("llama2", {"vocab_size": "53"}, "vocab_size='53':"),
        ("llama2", {"num_hidden_layers": 1.5}, r"num_layers=1.5:"),
        ("llama2", {"rms_norm_eps": None}, "norm_eps=None:"),
        ("llama2", {"tie_word_embeddings": 1}, "tie_embeddings=1:"),
        ("llama2", {"intermediate_size": -3}, "d_ff=-3:"),
        ("llama2", {"num_hidden_layers": 10**12}, r"num_layers=10+: .* 32 bits"),
        ("mixtral", {"num_local_experts": 4097}, r"num_experts=4097: .* 4096"),
        ("llama2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' are"),
        ("llama2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "x": 3}}, "'x': 3"),
        ("llama2", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "'short_"),
        ("llama_yarn", {"rope_scaling": {"type": "yarn", "factor": 2.0, "rope_theta": 100.0}},
         r"rope_scaling and rope_parameters .*=2.0"),
        ("llama2", {"rope_parameters": {"rope_type": "linear"}}, "'linear' need 'factor'"),
        ("llama2", {"rope_parameters": {"beta": 1.0}}, "unknown rotary parameters.*beta"),
        ("llama2", {"partial_rotary_factor": 0.5}, "unknown fields.*partial_rotary_factor=0.5"),
        ("mistral", {"attention_bias": True}, "unknown fields.*attention_bias=True"),
        ("llama2", {"rope_parameters": {"attention_factor": 2.0}},
         "parameters.*'attention_factor'"),
        ("llama3", {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 500.0}},
         r"rope_scaling and rope_parameters .*=2.0"),
        ("llama3", {"rope_theta": 7.0}, r"rope_theta and .* 7.0 and 500.0"),
        ("gemma3", {"rope_local_base_freq": 7.0}, "rope_local_base_freq and .* contradict"),
        ("llama2", {"rope_parameters": "linear"}, "rope_parameters='linear': must be"),
        ("gemma3", {"_sliding_window_pattern": 0}, "sliding_window_pattern=0:"),
        ("gemma3", {"_sliding_window_pattern": "6"}, "sliding_window_pattern='6':"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "config.json: "),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types=.*one of sliding"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types=.*for each layer"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("glm4_moe", {"n_group": 3}, r"experts.num_groups=3"),
        ("glm4_moe", {"first_k_dense_replace": 3}, "experts.first_dense=3 .* leave none"),
        ("ernie4_5_moe", {"moe_layer_end_index": 2}, "moe_layer_end_index=2"),
        ("gpt_oss", {"rope_parameters": ...}, "neither rope_scaling nor rope_parameters"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "attention.num_kv_heads=2: latent"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("opt", {"word_embed_proj_dim": 12}, r"word_embed_proj_dim=12 .* 24"),
        ("ministral3", {"rope_parameters": None}, "has neither rope_scaling nor rope_parameters"),
        ("ministral3", {"max_position_embeddings": 32}, "max_position.* contradict each other"),
        ("ministral3", {"rope_scaling": {"llama_4_scaling_beta": 0.3}}, "llama_4.* contradict"),
        ("llama_yarn", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "'llama_4_scal"),
        ("llama2", {"model_type": "phimoe"}, "'phimoe' is unknown.*sparsemixer"),
        (
            "modernbert",
            {"architectures": ["ModernBertForSequenceClassification"]},
            "whose head is not read: save the model under it",
        ),
        ("llama_classes", {"problem_type": "regression"}, "no logits of classes that exclude"),
        ("bert_classes", {"num_labels": 4}, "num_labels=4 and id2label=.* contradict"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, r"experts.per_token=9: .* 1 to"),
        ("olmo_hybrid", {"rope_parameters": None}, "rope_parameters=None"),
        ("olmo_hybrid", {"rope_parameters": ...}, "rope_parameters=None"),
        *(
            (name, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'")
            for name in ("qwen3_next", "qwen3_5", "olmo_hybrid", "granite_hybrid", "bamba")
        ),
        ("vit", {"image_size": [20, 24]}, r"image_size=\(20, 24\):"),
        ("vit", {"patch_size": 3}, r"patch_size=3 .* image_size=20"),
        ("siglip", {"attention_kind": "linear"}, "unknown fields.*attention_kind='linear'"),
        ("siglip", {"model_type": "siglip2_vision_model"}, "is unknown.*images of several sizes"),
        ("roberta", {"pad_token_id": None}, "pad_token_id=None:"),
        ("distilbert", {"activation": "silu"}, "activation='silu'"),
        ("esm", {"mask_token_id": None}, "token_dropout=True: needs a mask_token_id"),
        ("esm", {"position_embedding_type": "absolute"}, "position_embedding_type='absolute'"),
        ("modernbert", {"attention_kind": "linear"}, "unknown fields.*attention_kind='linear'"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "layer_types=.*for each layer"),
        ("qwen3_next", {"shared_expert_intermediate_size": 15}, "intermediate_size=15.*7"),
        ("qwen3_next", {"partial_rotary_factor": 0.25}, "rotary_factor contradict.*0.25 and 0.5"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval=0: must be"),
        ("bamba", {"time_step_limit": [0.1, 0.2]}, r"time_step_limit=\[0.1, 0.2\]"),
        ("bamba", {"mamba_d_head": 7}, "mamba_n_heads=6 times mamba_d_head=7.*48"),
        ("granite_hybrid", {"position_embedding_type": "alibi"}, "type='alibi'"),
        ("granite_hybrid_moe", {"shared_intermediate_size": 19}, "=19 is no multiple of .*=9"),
        ("phi3", {"head_dim": 9}, r"head_dim=9 .* 8"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=.*a"),
        ("smollm3", {"use_sliding_window": False}, "layer_types has a window"),
        ("exaone4_full", {"layer_types": ["sliding_attention"] * 2}, "layer_types has a window"),
        ("cohere2", {"sliding_window": None}, "sliding_window=None"),
        ("gpt_neo", {"attention_types": [[["local"], 3]]}, "attention_layers contradicts"),
        ("gpt2", {"model_type": "bloom"}, "'bloom' is unknown.*ALiBi"),
        ("mamba2", {"model_type": "nemotron_h"},
         "'nemotron_h' is unknown.*a mixer or an MLP alone"),
        ("xlstm", {"num_blocks": 3}, "num_blocks contradicts num_hidden_layers"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_unsupported_configurations_are_refused(name: str, changes: dict, message: str, copy: Any):
    folder = copy(name)
    edit(folder, **changes)
    with pytest.raises(PublishError, match=message) as error:
        zoo.load(folder)
    assert "config.json" in str(error.value)


def test_fields_with_one_supported_value_refuse_others():
    refused = 0
    for kind, name in {TYPES[name]: name for name in CASES}.items():
        values, family = json.loads((GOLDEN / name / "config.json").read_text()), MODEL_TYPES[kind]
        for rule in family.rules:
            if isinstance(rule, Fixed):
                other = not rule.value if isinstance(rule.value, bool) else "other"
                message = f"{rule.theirs}={other!r} is not supported, only {rule.value!r}"
                with pytest.raises(PublishError, match=re.escape(message)):
                    family.read({**values, rule.theirs: other}, "config.json")
                refused += 1
    assert refused > 90


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama2", {"auto_map": {"AutoModel": "code.Model"}, "is_encoder_decoder": False}),
        ("llama2", {"partial_rotary_factor": 1.0, "pruned_heads": {}, "sliding_window": None}),
        ("llama2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                    "factor": 1.0, "partial_rotary_factor": 1.0, "beta_fast": None}}),
        ("llama2", {"attention_bias": None, "mlp_bias": None, "do_sample": True, "top_p": 0.9}),
        ("mistral", {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}),
        ("qwen2", {"partial_rotary_factor": 1.0, "attn_logit_softcapping": None}),
        ("qwen3_moe", {"mlp_only_layers": None}),
        ("deepseek_v3", {"moe_layer_freq": 1, "ep_size": 1}),
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True}),
        ("gpt_oss", {"initial_context_length": 4096, "experts_per_token": 2}),
        ("gpt2", {"is_decoder": False, "add_cross_attention": None}),
        ("llama_linear", {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4}}),
        ("gemma3", {"rope_theta": 1000.0, "rope_local_base_freq": 100.0}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_values_without_effect_are_harmless(name: str, changes: dict, copy: Any):
    folder = copy(name)
    want = models.skeleton(folder).config
    edit(folder, **changes)
    assert models.skeleton(folder).config == want


def test_unknown_fields_are_allowed_by_name(copy: Any, tmp_path: Path):
    folder = copy("llama2")
    want = zoo.load(folder)
    edit(folder, attention_sinks=4, other=2)
    assert "zoo.load(..., ignore=('attention_sinks', 'other'))" in refusal(folder)
    model = zoo.load(folder, ignore=("attention_sinks", "other"))
    assert eqx.tree_equal(model, want)
    zoo.save(tmp_path / "again", model, format="hf", like=folder)
    assert eqx.tree_equal(zoo.load(tmp_path / "again"), want)
    # By name alone, and no field that the model follows.
    assert "unknown fields, which may change the maths: other=2" in refusal(
        folder, ignore=("attention_sinks",)
    )
    assert "ignore=['mlp_bias']" in refusal(folder, ignore=("mlp_bias", "attention_sinks", "other"))
    zoo.save(tmp_path / "own", model)
    assert "is in the zoo's own format" in refusal(tmp_path / "own", ignore=("other",))


PUBLISHED = json.loads((GOLDEN.parent / "published_configs.json").read_text())


@pytest.mark.parametrize(
    ("name", "parameters", "fields"),
    [
        ("Llama 3.2 1B", 1_235_814_400, {"positions.scaling": RopeScaling(32.0, 1.0, 4.0, 8192)}),
        ("Qwen 2.5 0.5B", 494_032_768, {"attention.window": None, "attention.head_dim": 64}),
        ("Gemma 3 1B", 999_885_952, {"attention.window": 512, "positions.local_theta": 10_000.0}),
        ("Qwen 3 30B A3B", 30_532_122_624, {"experts.num_experts": 128, "d_ff": 768}),
        # Its sizes of delta nets are the defaults: 30 heads with keys of 96 and values of 192.
        ("Olmo-Hybrid 7B", 7_430_870_688, {"positions.kind": "none",
                                           "mixer.recurrence.value_dim": 192}),
    ],
)  # fmt: skip
def test_published_configurations_have_published_sizes(name: str, parameters: int, fields: dict):
    values = PUBLISHED[name]
    family = MODEL_TYPES[values["model_type"]]
    config = family.read(values, "config.json")
    skeleton = eqx.filter_eval_shape(lambda: family.model(config, key=jax.random.key(0)))
    leaves = [x for x in jax.tree.leaves(skeleton) if isinstance(x, jax.ShapeDtypeStruct)]
    assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters
    found = configuration.flat(config) | {"positions.scaling": config.positions.scaling}
    assert {name: found[name] for name in fields} == fields
    assert family.difference(config) == []


def test_kimi_k2_is_deepseek_v3_under_another_name(copy: Any, tmp_path: Path):
    folder = copy("deepseek_v3")
    want = zoo.load(folder)
    edit(folder, model_type="kimi_k2")
    model = zoo.load(folder)
    assert configuration.replaced(model.config, {"origin": ""}) == want.config
    zoo.save(tmp_path / "again", model, format="hf", like=folder)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "kimi_k2"


@pytest.mark.parametrize("prefix", ["model.", "transformer.", "bert."])
def test_tensor_name_prefix_is_optional(prefix: str, copy: Any):
    name = {"model.": "llama3", "transformer.": "gpt2", "bert.": "bert"}[prefix]
    folder, want = copy(name), zoo.load(GOLDEN / name)
    stored = tensors(folder)
    bare = {x.removeprefix(prefix): y for x, y in stored.items()}
    if name == "bert":
        bare = {prefix + x: y for x, y in stored.items()}
    assert bare.keys() != stored.keys()
    safetensors.numpy.save_file(bare, folder / "model.safetensors")
    assert_same(zoo.load(folder), want)


def test_a_decoder_without_its_head_gives_vectors(copy: Any, tmp_path: Path):
    folder, whole = copy("llama3"), zoo.load(GOLDEN / "llama3")
    bare = {x.removeprefix("model."): y for x, y in tensors(folder).items() if "lm_head" not in x}
    safetensors.numpy.save_file(bare, folder / "model.safetensors")
    edit(folder, architectures=["LlamaModel"])
    model, tokens = zoo.load(folder), jnp.arange(8, dtype=jnp.int32)[None]
    want = np.asarray(whole.hidden(tokens))
    assert np.abs(want).max() > 1
    np.testing.assert_array_equal(model(tokens), want)
    zoo.save(tmp_path / "again", model, format="hf", like=folder)
    again = tensors(tmp_path / "again")
    assert again.keys() == bare.keys()
    assert all(again[x].tobytes() == y.tobytes() for x, y in bare.items())
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["architectures"] == ["LlamaModel"]


def test_classes_have_their_names_in_either_format(copy: Any, tmp_path: Path):
    own, folder, model = tmp_path / "own", copy("llama_classes"), zoo.load(GOLDEN / "llama_classes")
    zoo.save(own, model, metrics={"classes": ["up", "down", "level"]})
    edit(folder, id2label={"2": "neither", "0": "sad", "1": "glad"}, problem_type="regression")
    assert zoo.load(own).head.bias is None
    for like, names in ((own, ["up", "down", "level"]), (folder, ["sad", "glad", "neither"])):
        to, ignore = tmp_path / f"of_{like.name}", ("problem_type",) * (like == folder)
        zoo.save(to, zoo.load(like, ignore=ignore), format="hf", like=like)
        written = json.loads((to / "config.json").read_text())
        assert written["architectures"] == ["LlamaForSequenceClassification"]
        assert [*written["id2label"].values()] == [*written["label2id"]] == names
    biased = zoo.Classifier(model.body, 3, key=jax.random.key(0))
    with pytest.raises(
        PublishError, match="pooling='last' and bias=True, but pooling='last' and b"
    ):
        zoo.save(tmp_path / "biased", biased, format="hf")
    # An older file of tags may have a pooler, which nothing reads.
    tags = copy("bert_tags")
    more = {f"bert.pooler.dense.{x}": np.ones(shape, np.float32) for x, shape in (
        ("weight", (12, 12)), ("bias", (12,)))}  # fmt: skip
    safetensors.numpy.save_file(tensors(tags) | more, tags / "model.safetensors")
    assert zoo.load(tags).body.pooler is None


def test_buffers_and_tied_heads_are_accepted(copy: Any):
    folder = copy("gpt2")
    stored = tensors(folder)
    extra = {"transformer.h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)}
    head = {"lm_head.weight": stored["transformer.wte.weight"]}
    safetensors.numpy.save_file(stored | extra | head, folder / "model.safetensors")
    zoo.load(folder)
    head = {"lm_head.weight": stored["transformer.wte.weight"] + 1}
    safetensors.numpy.save_file(stored | extra | head, folder / "model.safetensors")
    assert "lm_head.weight: (53, 20) here, none" in refusal(folder)


def test_a_hybrid_that_transformers_wrote_is_the_published_one(copy: Any):
    """Version 5 renames its norms, and has the channels of its three convolutions in thirds."""
    folder = copy("olmo_hybrid")
    want, stored = zoo.load(folder), tensors(folder)
    norms = {"input_layernorm": "attention_layer_norm"}
    norms |= {"post_attention_layernorm": "feedforward_layer_norm"}
    for name in list(stored):
        *start, part, end = name.split(".")
        if part in norms:
            stored[".".join([*start, norms[part], end])] = stored.pop(name)
        if part == "q_conv1d":
            names = [name.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
            whole = np.concatenate([stored[x] for x in names])
            thirds = np.split(whole, [-(-len(whole) // 3), -(-len(whole) // 3) * 2])
            assert len(thirds[0]) != len(stored[name])
            stored |= dict(zip(names, thirds, strict=True))
    safetensors.numpy.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    found = zoo.load(folder)
    assert found.config == want.config
    jax.tree.map(np.testing.assert_array_equal, found, want)
    # Slices of a tensor too, as the devices of a mesh read them.
    whole = dict.fromkeys(("vocab", "mlp"), sharding.RULES["positions"])
    split = zoo.load(
        folder, mesh=zoo.Layout(zoo.make_mesh("tensor=2"), rules=sharding.RULES | whole)
    )
    jax.tree.map(np.testing.assert_array_equal, split, want)


@pytest.mark.parametrize(
    ("name", "whole_type", "prefix", "head"),
    [("gemma3", "gemma3", "model.language_model.", ""),
     ("mistral", "mistral3", "language_model.model.", "language_model."),
     ("qwen3_5", "qwen3_5", "model.language_model.", ""),
     ("siglip", "siglip", "", "vision_model.")],
)  # fmt: skip
def test_a_part_of_a_whole_model_is_opened(
    name: str, whole_type: str, prefix: str, head: str, copy: Any, caplog: Any
):
    folder = copy(name)
    plain, part = zoo.load(folder), json.loads((folder / "config.json").read_text())
    stored = {
        x.replace("model.", prefix, 1) if x.startswith("model.") else head + x: y
        for x, y in tensors(folder).items()
    }
    others = {"model.vision_tower.x": "a vision tower",
              "multi_modal_projector.y": "a projector of images"}  # fmt: skip
    if name == "qwen3_5":
        others = {"model.visual.merger.weight": "a vision tower",
                  "mtp.fc.weight": "heads of multi-token prediction"}  # fmt: skip
    if name == "siglip":
        others = {"text_model.x": "a text tower", "logit_scale": "the scale and bias"}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    stored |= {other: np.ones(3) for other in others}
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    field = "vision_config" if name == "siglip" else "text_config"
    values = {"model_type": whole_type, field: part}
    (folder / "config.json").write_text(json.dumps(values))
    assert_same(zoo.load(folder), plain)
    assert all(content in caplog.text for content in others.values())


def test_fields_that_the_text_part_leaves_to_transformers_are_its_defaults():
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    left = {"num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim"}
    family = MODEL_TYPES["gemma3_text"]
    config = family.read({x: y for x, y in text.items() if x not in left}, "config.json")
    sizes = config.num_heads, config.kv_heads, config.head_size, config.vocab_size
    assert sizes == (8, 4, 256, 262_208)


def test_bert_pooler_is_optional(copy: Any):
    folder = copy("bert")
    stored = {name: x for name, x in tensors(folder).items() if "pooler" not in name}
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    model = zoo.load(folder)
    with pytest.raises(ValueError, match=r"encoder\.pooler=False"):
        model.pooled(jnp.ones((1, 2, 24)))
    zoo.save(folder.with_name("again"), model, format="hf")
    assert tensors(folder.with_name("again")).keys() == stored.keys()


# Damage


def test_mismatched_tensors_are_named(copy: Any):
    folder = copy("llama2")
    stored = tensors(folder)
    stored["model.layers.0.surplus"] = stored.pop("model.norm.weight")
    stored["lm_head.weight"] = stored["lm_head.weight"][:50]
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    assert [line.strip() for line in refusal(folder).splitlines()[1:]] == [
        "lm_head.weight: (50, 24) here, (53, 24) by the configuration",
        "model.layers.0.surplus: (24,) here, none by the configuration",
        "model.norm.weight: none here, (24,) by the configuration",
    ]


def test_damaged_files_are_refused(copy: Any):
    folder = copy("llama2")
    path, config = folder / "model.safetensors", folder / "config.json"
    content, good = path.read_bytes(), config.read_bytes()
    huge = (2**63 - 1).to_bytes(8, "little")
    for damaged in (content[:-3], content[:100], b"", huge + content[8:], b"\x80\x04." * 9):
        path.write_bytes(damaged)
        assert "model.safetensors is damaged, or no safetensors file" in refusal(folder)
    path.unlink()
    assert "has neither model.safetensors nor" in refusal(folder)
    path.write_bytes(content)
    for damaged in (good[:-5], b"[]", b"\xff\xfe"):
        config.write_bytes(damaged)
        assert "config.json" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_never_opened(name: str, copy: Any):
    folder = copy("llama2")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    message = refusal(folder)
    assert name in message
    assert "runs any code that is in it" in message
    assert "is a file: a model is a folder" in refusal(folder / name)
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(x="../elsewhere.safetensors"), r"x lies in '../elsewhere.*outside"),
        (lambda m: m.update(x="/etc/passwd"), "x lies in '/etc/passwd', outside"),
        (lambda m: m.update(x="a\\b.safetensors"), "outside the folder"),
        (lambda m: m.update(x=".."), "outside the folder"),
        (lambda m: m.update(x="weights.bin"), r"x lies in 'weights.bin', .* safetensors"),
        (lambda m: m.update(x="gone.safetensors"), r"gone\.safetensors is missing"),
        (lambda m: m.update(x=1), "index.json is damaged"),
        (lambda m: m.clear(), "index.json is damaged"),
        (lambda m: m.update(x=m["lm_head.weight"]), "names tensors that their files lack: x in"),
        (lambda m: m.pop("lm_head.weight"),
         r"holds lm_head.weight, which model.safetensors.index.json"),
    ],
)  # fmt: skip
def test_invalid_shard_indexes_are_refused(change: Any, message: str, copy: Any):
    folder = copy("mistral")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    with pytest.raises(PublishError, match=message):
        zoo.load(folder)


def test_two_sets_of_weights_are_refused(copy: Any):
    folder = copy("llama2")
    names = list(tensors(folder))
    write = lambda file: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, file)})
    )
    want = zoo.load(folder)
    write("model.safetensors")  # which is what is opened without it
    assert eqx.tree_equal(zoo.load(folder), want)
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    write("model-00001-of-00001.safetensors")
    assert "both model.safetensors, which transformers opens, and model.saf" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert eqx.tree_equal(zoo.load(folder), want)


# Shardings and memory


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt2", "bfloat16"), ("mixtral", None), ("gemma3", None)]
)
def test_loaded_weights_are_sharded(name: str, dtype: Any, copy: Any):
    folder, rules = copy(name), {**sharding.RULES}
    mesh = zoo.make_mesh("fsdp=2,tensor=1" if name == "mixtral" else "fsdp=4")
    want = zoo.load(folder)
    got = zoo.load(folder, mesh=mesh, dtype=dtype)
    placed = sharding.shardings(got, zoo.Layout(mesh, rules))
    for (path, x), where in zip(arrays(got).items(), jax.tree.leaves(placed), strict=True):
        whole = arrays(want)[path]
        assert x.sharding.is_equivalent_to(where, x.ndim), path
        np.testing.assert_array_equal(x, whole.astype(dtype or whole.dtype))
    assert not got.blocks.attention.wq.sharding.is_fully_replicated


def test_layout_slices_match_whole_arrays():
    """By a mesh that splits heads, experts and widths, over names that do not lie together."""
    rng = np.random.default_rng(0)
    for name in ("gpt2", "mixtral", "llama3", "qwen3_next"):
        model, family = zoo.load(GOLDEN / name), None
        kind = json.loads((GOLDEN / name / "config.json").read_text())["model_type"]
        family = MODEL_TYPES[kind]
        stored = tensors(GOLDEN / name)
        names = family.layouts(model, family.prefixes[0])
        for path, whole in arrays(model).items():
            for _ in range(5):
                starts = [int(rng.integers(0, n)) for n in whole.shape]
                index = tuple(
                    slice(a, int(rng.integers(a, n)) + 1)
                    for a, n in zip(starts, whole.shape, strict=True)
                )
                got = names[path].read(index, np.float32, lambda key, s: stored[key][s])  # noqa: B023
                np.testing.assert_array_equal(got, np.asarray(whole)[index], err_msg=path)


PEAK = """
import sys, threading, time, resource
sys.path.insert(0, sys.argv[2])
import jax, numpy as np
import zoo
from pathlib import Path
folder = Path(sys.argv[1])
mesh = zoo.make_mesh("fsdp=8")
zoo.load(folder / "small", mesh=mesh)  # what the program itself takes, and compiled code
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
model = zoo.load(folder / "large", mesh=mesh)
done = True
thread.join()
peak = max(peak, resident())
size = sum(path.stat().st_size for path in (folder / "large").glob("*.safetensors"))
held = {}
for leaf in jax.tree.leaves(model):
    if isinstance(leaf, jax.Array):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
print((peak - before) / size, max(held.values()) / size, min(held.values()) / size, len(held))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_loading_memory_stays_near_file_size(tmp_path: Path):
    """Mapped pages of the files count too: this is the whole process's resident memory."""
    options = {"vocab_size": 8192, "d_ff": 1024, "attention.head_dim": None, "tie_embeddings": True}
    for name, size, layers in (("small", 64, 1), ("large", 512, 6)):
        model = drawn_transformer(d_model=size, num_layers=layers, **options)
        zoo.save(tmp_path / name, model, format="hf")
        (tmp_path / name / "checksums.json").unlink()
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(Path(zoo.__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, most, least, devices = map(float, done.stdout.split())
    print(f"peak {peak:.2f} of the file's size, each device holds {least:.4f} to {most:.4f} of it")
    assert peak < 1.3
    assert devices == 8
    assert 0.12 < least <= most < 0.13


# Saving


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "llama"),
        ({"attention.qk_norm": "per_head"}, "qwen3"),
        ({"attention.window": 5}, "mistral"),
        ({"experts.num_experts": 4, "d_ff": 12, "tie_embeddings": True}, "mixtral"),
        (
            {"residual.norm": "layer", "positions.kind": "learned", "bias": True, "mlp": "gelu"},
            "gpt2",
        ),
    ],
    ids=str,
)
def test_exports_choose_the_matching_family(options: dict, kind: str, tmp_path: Path):
    plain = transformer.Config(vocab_size=8, d_model=8, num_layers=1, num_heads=2)
    config = configuration.replaced(plain, options)
    model = transformer.Transformer(config, key=jax.random.key(0))
    zoo.save(tmp_path / "model", model, format="hf", card="A card.")
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["model_type"] == kind
    # Other programs refuse a null, or have a default of their own for it.
    names = {"n_inner"} if kind == "gpt2" else {"intermediate_size", "num_key_value_heads"}
    names |= set() if kind == "gpt2" else {"head_dim"}
    assert {name: values[name] for name in names if not isinstance(values[name], int)} == {}
    assert "A card." in (tmp_path / "model" / "README.md").read_text()
    again = zoo.load(tmp_path / "model")
    for path, x in arrays(model).items():
        np.testing.assert_array_equal(x, arrays(again)[path], err_msg=path)
    assert again.config == hf.family.canonical(model.config)
    zoo.save(tmp_path / "model", again, format="hf")  # it may be replaced
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damage")
    assert "model.safetensors has 6 bytes" in refusal(tmp_path / "model")


def test_unexportable_models_are_refused(tmp_path: Path):
    with pytest.raises(PublishError, match=r"qwen3 .* residual.norm_placement='both'"):
        zoo.save(
            tmp_path / "a",
            drawn_transformer(
                **{"attention.qk_norm": "per_head", "residual.norm_placement": "both"}
            ),
            format="hf",
        )
    with pytest.raises(PublishError, match="no family of Hugging Face's has such a model"):
        zoo.save(tmp_path / "a", drawn_transformer(causal=False), format="hf")
    sizes = zoo.mlp.Config(in_size=2, hidden_size=2, num_layers=1, out_size=2)
    other = zoo.mlp.MLP(sizes, key=jax.random.key(0))
    with pytest.raises(PublishError, match="has no MLP"):
        zoo.save(tmp_path / "a", other, format="hf")
    assert not list(tmp_path.iterdir())


def test_modified_model_classes_are_refused(tmp_path: Path):
    with pytest.raises(
        PublishError, match=r"blocks\.mlp: helpers\.LoudMLP here, zoo\..*\.blocks\.MLP"
    ):
        zoo.save(tmp_path / "a", with_loud_mlp(drawn_transformer()), format="hf")

    class Own(transformer.Transformer):
        pass

    own = as_subclass(drawn_transformer(), Own)
    with pytest.raises(PublishError, match=r"Own here, zoo\.transformer\.model\.Transformer by"):
        zoo.save(tmp_path / "a", own, format="hf")
    assert not list(tmp_path.iterdir())


def test_tensors_are_fetched_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf.layouts, "BLOCK_BYTES", 1024)
    fetched = FetchedSizes(monkeypatch, hf.layouts)
    model = drawn_transformer(num_layers=4, d_ff=24, **{"experts.num_experts": 4})
    zoo.save(tmp_path / "model", model, format="hf")
    assert fetched.most_at_once <= 2 * 1024 < model.embedding.weight.nbytes
    stored = tensors(tmp_path / "model")
    assert fetched.count > 2 * len(stored) > 2 * 4 * 4 * 3
    safetensors.numpy.save_file(stored, tmp_path / "at once", metadata={"format": "pt"})
    again = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "at once").read_bytes()


IMAGES = {"vit", "dinov2", "dinov3_vit", "siglip_vision_model"}
ENCODERS = {"bert", "roberta", "distilbert", "esm", "modernbert"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if TYPES[name] not in IMAGES])
def test_transformers_opens_saved_models(name: str, tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    zoo.save(tmp_path / "model", zoo.load(GOLDEN / name), format="hf")
    golden = np.load(GOLDEN / name / "golden.npz")
    kind = transformers.AutoModelForCausalLM
    if TYPES[name] in ENCODERS:
        bare = transformers.AutoModel
        kind = bare if "hidden" in golden else transformers.AutoModelForMaskedLM
    model, report = kind.from_pretrained(
        tmp_path / "model",
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    missing = [
        x
        for x in report["missing_keys"]
        if not x.endswith(("inv_freq", "regression.weight", "regression.bias"))
    ]
    assert not missing
    assert not any(report[x] for x in ("unexpected_keys", "mismatched_keys"))
    names = {"tokens": "input_ids", "mask": "attention_mask", "token_types": "token_type_ids"}
    inputs = {theirs: golden[ours] for ours, theirs in names.items() if ours in golden}
    inputs = {key: torch.from_numpy(x.astype(np.int64)) for key, x in inputs.items()}
    with torch.no_grad():
        out = model.eval()(**inputs)
    got = out.last_hidden_state if "hidden" in golden else out.logits
    want = golden["hidden" if "hidden" in golden else "logits"]
    seen = golden.get("mask", np.ones((1, 1), bool))
    np.testing.assert_allclose(np.where(seen[..., None], got - want, 0), 0, atol=1e-5)


# The hub

HUB = """
import sys
sys.path.insert(0, sys.argv[1])
import zoo
from zoo.publishing import models, shelf
from zoo.publishing import PublishError
for name in sys.argv[2:]:
    try:
        if name.startswith("plan:"):
            name = name.removeprefix("plan:")
            skeleton = models.skeleton(name, weights=False)
            files = sorted(path.name for path in shelf.find(name, weights=False).iterdir())
            print("planned", skeleton.embedding.weight, *files)
            continue
        print("loaded", type(zoo.load(name)).__name__)
    except PublishError as error:
        print("refused", error)
"""


def load_from_hub(*names: str, **environment: str) -> list[str]:
    """What a process of its own says, for the client reads its environment when it is imported."""
    command = [sys.executable, "-c", HUB, str(Path(zoo.__file__).parents[1]), *names]
    environment = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    said = ("planned", "loaded", "refused")
    return [line for line in done.stdout.splitlines() if line.startswith(said)]


def test_hub_ids_open_from_the_cache(tmp_path: Path):
    pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")
    home, commit = tmp_path / "home", "0" * 40
    repository = home / "hub" / "models--someone--something"
    shutil.copytree(GOLDEN / "llama2", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    names = ("someone/something", "someone/else")
    here, elsewhere = load_from_hub(*names, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    assert here == "loaded Transformer"
    assert elsewhere.startswith("refused 'someone/else' is no folder here")
    assert "HF_HUB_OFFLINE is set" in elsewhere
    assert str(home) in elsewhere


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bert", "modernbert"])
def test_skeletons_without_weights_are_those_with_them(tmp_path: Path, name: str):
    values = json.loads((GOLDEN / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    here = models.skeleton(tmp_path, weights=False)
    stored = models.skeleton(GOLDEN / name, dtype="bf16")
    assert jax.tree.structure(here) == jax.tree.structure(stored)
    assert jax.tree.leaves(here) == jax.tree.leaves(stored)
    assert len({leaf for leaf in jax.tree.leaves(here) if hasattr(leaf, "shape")}) > 4
    with pytest.raises(PublishError, match=r"has neither model\.safetensors nor"):
        models.skeleton(tmp_path)


class Hub(BaseHTTPRequestHandler):
    """One model, at the addresses that the client asks for."""

    folder = GOLDEN / "mistral"
    others: ClassVar = {
        "pytorch_model.bin": b"cos\nsystem",
        "original/model.safetensors": b"x",
        "model-old/part.safetensors": b"x",
        "additional_chat_templates/tool_use.jinja": b"x",
    }
    asked: ClassVar[list[str]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        commit, files = "1" * 40, {path.name: path.read_bytes() for path in self.folder.iterdir()}
        files |= self.others
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        kind, status = "application/json", 200
        if self.path.startswith("/api/models/someone/served/"):
            siblings = [{"rfilename": name} for name in files]
            body = json.dumps({"id": "someone/served", "sha": commit, "siblings": siblings})
            content = body.encode()
            if "/tree/" in self.path:
                entries = [
                    {"type": "file", "path": name, "size": len(x), "oid": "0"}
                    for name, x in files.items()
                ]
                content = json.dumps(entries).encode()
        elif name in files and self.path.startswith("/someone/served/"):
            content, kind = files[name], "application/octet-stream"
        else:
            content, status = b"{}", 404
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET


def test_hub_ids_are_downloaded_and_cached(tmp_path: Path):
    pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    home = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    names = ("plan:someone/served", "someone/served", "someone/missing")
    planned, served, missing = load_from_hub(*names, **home)
    server.shutdown()
    server.server_close()
    assert planned.startswith("planned ShapeDtypeStruct(")
    # What text is read and written by, and none of the weights.
    assert planned.endswith(") additional_chat_templates config.json")
    assert served == "loaded Transformer"
    assert missing.startswith("refused 'someone/missing' is no folder here")
    assert f"{endpoint} gave" in missing
    fetched = {path.name for path in tmp_path.rglob("snapshots/*/*")}
    assert "model.safetensors.index.json" in fetched
    assert not fetched & {"pytorch_model.bin", "golden.npz", "original", "model-old"}
    assert [path.name for path in tmp_path.rglob("snapshots/*/*/*")] == ["tool_use.jinja"]


def test_missing_hub_client_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'zoo[hf]'" in refusal("someone/something")


def test_hub_ids_are_told_from_paths():
    assert hf.is_hub_id("meta-llama/Llama-3.2-1B")
    for name in ("models", "a/b/c", "../model", "/tmp/model", "a/", "runs\\model", "a b/c"):
        assert not hf.is_hub_id(name), name


def test_files_of_other_programs_go_out_as_they_came(copy: Any, tmp_path: Path):
    names = "tokenizer.model vocab.json merges.txt preprocessor_config.json processor_config.json "
    names += "special_tokens_map.json added_tokens.json chat_template.jinja"
    folder = copy("llama2")
    tokenizer.BPETokenizer.train(["ab ab"], 258).save(folder)
    contents = {name: f'{{"{name}": 1}}'.encode() for name in names.split()}
    assert contents.keys() <= set(hf.folder.FILES)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    model, opened = zoo.load(folder), tokenizer.load_tokenizer(folder)
    zoo.save(tmp_path / "out", model, format="hf", tokenizer=opened, like=folder)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in contents} == contents


# Token ids


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 3}, None, (3,)),
        ({"eos_token_id": [3, 4]}, None, (3, 4)),
        ({"eos_token_id": 3}, {"eos_token_id": [5, 3]}, (5, 3)),
        ({"eos_token_id": 3}, {"bos_token_id": 1}, (3,)),
        ({}, {"eos_token_id": 0}, (0,)),
        ({}, {}, ()),
    ],
    ids=str,
)
def test_the_ids_that_end_a_text_are_read(config: dict, generation: Any, ids: Any, copy: Any):
    folder = copy("llama2")
    edit(folder, **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert models.skeleton(folder).config.eos_ids == ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id="),
        ('{"eos_token_id": [true]}', "eos_token_id="),
        ("[", "is damaged"),
    ],
)
def test_damaged_ids_are_refused(content: str, message: str, copy: Any):
    folder = copy("llama2")
    (folder / "generation_config.json").write_text(content)
    text = refusal(folder)
    assert message in text
    assert "generation_config.json" in text


@pytest.mark.parametrize("ids", [53, [3, 53], -1])
def test_ends_that_are_never_drawn_are_kept(ids: Any, copy: Any, caplog: Any, tmp_path: Path):
    folder = copy("llama2")
    edit(folder, eos_token_id=ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    model = zoo.load(folder)
    assert model.config.eos_ids == ((3,) if isinstance(ids, list) else ())
    [warning] = caplog.messages
    assert "has ids beyond vocab_size=53" in warning
    zoo.save(tmp_path / "again", model, format="hf", like=folder)
    values, generation = contents(tmp_path / "again")
    assert values["eos_token_id"] == generation["eos_token_id"] == ids
    assert zoo.load(tmp_path / "again").config == model.config


def test_a_save_without_like_says_what_it_leaves_out(copy: Any, caplog: Any, tmp_path: Path):
    folder = copy("llama2")
    model = zoo.load(folder)
    zoo.save(tmp_path / "plain", model, format="hf")
    [warning] = caplog.messages
    assert "without like=" in warning
    caplog.clear()
    zoo.save(tmp_path / "like", model, format="hf", like=folder)
    zoo.save(tmp_path / "own", model)
    assert not caplog.messages


class Ends:
    """A tokenizer that knows its ids, and writes no settings of its own."""

    bos_id, eos_ids, pad_id, separator_id = 1, (2, 3), 0, 1

    def save(self, folder: Path) -> None:
        pass


def contents(folder: Path) -> tuple[dict, dict | None]:
    generation = folder / "generation_config.json"
    values = json.loads((folder / "config.json").read_text())
    return values, json.loads(generation.read_text()) if generation.exists() else None


IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize(
    ("tokenizer", "own", "ids", "generation"),
    [
        (None, (), (None, None, None), None),
        (None, (4,), (None, 4, None), {"eos_token_id": 4}),
        (Ends(), (), (1, [2, 3], 0), dict(zip(IDS, (1, [2, 3], 0), strict=True))),
        (Ends(), (4, 5), (1, [4, 5], 0), dict(zip(IDS, (1, [4, 5], 0), strict=True))),
    ],
    ids=["none", "own", "tokenizer", "both"],
)
def test_ids_are_written(tokenizer: Any, own: Any, ids: Any, generation: Any, tmp_path: Path):
    model = drawn_transformer(num_layers=1, eos_ids=own)
    zoo.save(tmp_path / "model", model, format="hf", tokenizer=tokenizer)
    values, written = contents(tmp_path / "model")
    assert tuple(values[name] for name in IDS) == ids
    assert written == generation
    eos = ids[1] if isinstance(ids[1], list) else [ids[1]] if ids[1] is not None else []
    assert zoo.load(tmp_path / "model").config.eos_ids == tuple(eos)


def test_a_model_is_saved_like_the_one_it_came_from(copy: Any, tmp_path: Path):
    folder = copy("llama3")
    given = dict(zip(IDS, (7, 5, 8), strict=True))
    settings = {"eos_token_id": [5, 6], "temperature": 0.6, "do_sample": True}
    edit(folder, **given)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    stored = {
        name: x if name.endswith("norm.weight") else x.astype(jnp.bfloat16)
        for name, x in tensors(folder).items()
    }
    safetensors.numpy.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    model = zoo.load(folder, dtype="fp32")
    zoo.save(tmp_path / "again", model, format="hf", tokenizer=Ends(), like=folder)
    values, written = contents(tmp_path / "again")
    assert {name: values[name] for name in IDS} == given
    assert written == {"bos_token_id": 7, "pad_token_id": 8, **settings}
    again = tensors(tmp_path / "again")
    assert {str(x.dtype) for x in again.values()} == {"bfloat16", "float32"}
    assert {name: x.dtype for name, x in again.items()} == {k: x.dtype for k, x in stored.items()}
    assert all(x.tobytes() == stored[name].tobytes() for name, x in again.items())
    assert (values["dtype"], values["torch_dtype"]) == ("bfloat16", "bfloat16")
    # Other ends than the folder's are those of both files.
    other = families.with_more_ends(model, (9, 5))
    zoo.save(tmp_path / "other", other, format="hf", like=folder)
    values, written = contents(tmp_path / "other")
    assert values["eos_token_id"] == written["eos_token_id"] == [5, 6, 9]
    assert written["temperature"] == 0.6


@pytest.mark.parametrize("name", ["llama2", "llama3", "llama_linear", "gemma3", "qwen3_moe"])
def test_rotary_parameters_are_written_as_transformers_5_does(name: str, tmp_path: Path):
    model = zoo.load(GOLDEN / name)
    zoo.save(tmp_path / name, model, format="hf")
    values, _ = contents(tmp_path / name)
    golden = json.loads((GOLDEN / name / "config.json").read_text())["rope_parameters"]
    assert values["rope_parameters"] == golden
    # And for the versions before it, as `test_older_config_spellings_are_read` has them.
    edit(tmp_path / name, rope_parameters=...)
    (tmp_path / name / "checksums.json").unlink()
    assert models.skeleton(tmp_path / name).config == model.config


def test_the_processor_of_images_is_kept(copy: Any, tmp_path: Path):
    folder, content = copy("vit"), b'{"size": {"height": 20, "width": 20}}'
    (folder / "preprocessor_config.json").write_bytes(content)
    zoo.save(tmp_path / "again", zoo.load(folder), format="hf", like=folder)
    assert (tmp_path / "again" / "preprocessor_config.json").read_bytes() == content
    assert zoo.images.Processor.of(tmp_path / "again").size == (20, 20)
