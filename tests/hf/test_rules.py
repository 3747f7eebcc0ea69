"""zoo.hf.rules: fields of a `config.json`, read, refused by name, and written."""

import json
import math
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import pytest
from hf_cases import TYPES, contents, edit, refusal
from test_hf import CASES, GOLDEN

import zoo
from zoo.common import configuration
from zoo.hf.model_types import MODEL_TYPES
from zoo.hf.rules import Fixed
from zoo.publishing import PublishError, models
from zoo.transformer.rotary import RopeScaling

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
        *((x, {"rope_parameters": ...}) for x in ("cohere", "cohere2", "ernie4_5", "helium")),
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


def test_fields_that_the_text_part_leaves_to_transformers_are_its_defaults():
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    left = {"num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim"}
    family = MODEL_TYPES["gemma3_text"]
    config = family.read({x: y for x, y in text.items() if x not in left}, "config.json")
    sizes = config.num_heads, config.kv_heads, config.head_size, config.vocab_size
    assert sizes == (8, 4, 256, 262_208)
    pictures = MODEL_TYPES["dinov3_vit"].read({}, "config.json")
    assert (pictures.d_model, pictures.num_heads, pictures.d_ff) == (384, 6, 1536)


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
