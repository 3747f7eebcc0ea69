"""Adapters in the format of PEFT, both ways, and the base that they are for."""

import json
import shutil
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from helpers import arrays, assert_trees_close, drawn_transformer, make_rnn

import zoo
from zoo import lora, mlp, sharding
from zoo.common import checksums
from zoo.data.tokenizer import ByteTokenizer, load_tokenizer
from zoo.publishing import PublishError, families, formats, models, shelf
from zoo.publishing.models import with_paths
from zoo.sharding.axes import keystr
from zoo.transformer.part_configs import ExpertsConfig
from zoo.wrappers.ensemble import Ensemble
from zoo.wrappers.retrained import Retrained

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in (GOLDEN / "peft").glob("*/golden.npz"))
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = jax.random.key(0)
merge = eqx.filter_jit(lora.merge)
TOKENS = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)


def base_of(name: str) -> Path:
    config = json.loads((GOLDEN / "peft" / name / CONFIG).read_text())
    return GOLDEN / "peft" / config["base_model_name_or_path"]


def opened(name: str, folder: Path) -> Path:
    """A copy of golden adapters, which name their base by its path."""
    shutil.copytree(GOLDEN / "peft" / name, folder)
    edit(folder, base_model_name_or_path=str(base_of(name)))
    return folder


def base_in(folder: Path) -> formats.Base:
    format = formats.of(folder)
    assert isinstance(format, formats.AdapterFormat)
    return format.base(folder)


def edit(folder: Path, **changes) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change) -> None:
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)


def drawn(model, config: lora.Config):
    """The model with adapters that change it."""
    rng = np.random.default_rng(0)

    def draw(x):
        if not lora.is_adapted(x) or x.frozen:
            return x
        if isinstance(x, Retrained):
            return eqx.tree_at(lambda x: x.new, x, x.new + 0.3 * rng.normal(size=x.new.shape))
        up = jnp.asarray(0.2 * rng.normal(size=x.up.shape), jnp.float32)
        x = eqx.tree_at(lambda x: x.up, x, up)
        if x.magnitude is None:
            return x
        return eqx.tree_at(lambda x: x.magnitude, x, x.magnitude * 1.3)

    return jax.tree.map(draw, lora.adapt(model, config, key=KEY), is_leaf=lora.is_adapted)


def sums_of_peft(folder: Path, base: Path) -> dict[str, np.ndarray]:
    """The modules' weights with PEFT's adapters, by the formulas and the files alone."""
    values = json.loads((folder / CONFIG).read_text())
    weights = safetensors.numpy.load_file(base / "model.safetensors")
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    found = {}
    for key, down in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        prefix = key.removesuffix("lora_A.weight")
        module = prefix.removeprefix("base_model.model.").removesuffix(".")
        if "experts" in module:
            found |= experts_of_peft(
                values, module, down, tensors[f"{prefix}lora_B.weight"], weights
            )
            continue
        alpha = values["alpha_pattern"].get(module.rpartition(".")[2], values["lora_alpha"])
        rank = len(down)
        scale = alpha / (rank**0.5 if values["use_rslora"] else rank)
        weight = weights[f"{module}.weight"]
        added = scale * tensors[f"{prefix}lora_B.weight"] @ down
        total = weight + (added.T if values["fan_in_fan_out"] else added)
        if values["use_dora"]:
            inputs = 0 if values["fan_in_fan_out"] else 1
            length = np.linalg.norm(total, axis=inputs)
            factor = tensors[f"{prefix}lora_magnitude_vector"] / length
            total = total * np.expand_dims(factor, inputs)
        found[f"{module}.weight"] = total
    for key, new in tensors.items():
        module, end = key.removeprefix("base_model.model.").rsplit(".", 1)
        if end == "trainable_tokens_delta":
            name = f"{module.removesuffix('.token_adapter')}.weight"
            ids = values["trainable_token_indices"]
            found[name] = weights[name].copy()
            found[name][ids if isinstance(ids, list) else next(iter(ids.values()))] = new
        elif end == "weight" and f"{module}.weight" in weights:  # of modules_to_save
            found[f"{module}.weight"] = new
    return {**weights, **found}


def experts_of_peft(values, module, down, up, weights) -> dict[str, np.ndarray]:
    """The same of a stack of experts, of which the first parameter is the one inside."""
    root = module.removesuffix(".base_layer")
    count = sum(key.startswith(f"{root}.") for key in weights) // 3
    rank = len(down) // count
    one, other = down.reshape(count, rank, -1), up.reshape(len(up), rank, count)
    added = values["lora_alpha"] / rank * np.einsum("ore,eri->eoi", other, one)
    names = ("down_proj",) if module == root else ("gate_proj", "up_proj")
    parts = dict(zip(names, np.split(added, len(names), 1), strict=True))
    keys = {f"{root}.{i}.{name}.weight": x[i] for name, x in parts.items() for i in range(count)}
    return {key: weights[key] + x for key, x in keys.items()}


@pytest.mark.parametrize("name", CASES)
def test_adapters_of_peft_are_merged_by_its_formulas(name: str, tmp_path: Path):
    merged = merge(zoo.load(opened(name, tmp_path / "adapters")))
    zoo.save(tmp_path / "merged", merged, format="hf")
    written = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    before = safetensors.numpy.load_file(base_of(name) / "model.safetensors")
    wanted = sums_of_peft(GOLDEN / "peft" / name, base_of(name))
    assert written.keys() == wanted.keys()
    assert sum(np.abs(wanted[key] - before[key]).max() > 0.1 for key in wanted) >= 2
    for key, value in wanted.items():
        np.testing.assert_allclose(written[key], value, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dora", "experts", "tokens", "whole"])  # a kind of product each
def test_adapters_of_peft_give_its_logits(name: str, tmp_path: Path):
    golden = np.load(GOLDEN / "peft" / name / "golden.npz")
    tokens = jnp.asarray(golden["tokens"])
    folder = opened(name, tmp_path / "adapters")
    model = zoo.load(folder)
    np.testing.assert_allclose(model(tokens), golden["logits"], atol=1e-5)
    merged, plain = arrays(lora.merge(model)), zoo.load(base_of(name))
    changed = [path for path, x in arrays(plain).items() if np.abs(x - merged[path]).max() > 0.1]
    config = lora.config_of(model)
    wanted = {*config.targets, *config.whole, *(["embedding.weight"] if config.tokens else [])}
    assert set(changed) == wanted
    # Once more as the zoo writes them.
    zoo.save_adapters(tmp_path / "again", model, base=base_of(name))
    again = arrays(lora.merge(zoo.load_adapters(tmp_path / "again", plain)))
    for path, array in merged.items():
        np.testing.assert_allclose(again[path], array, rtol=0, atol=1e-6)


def test_adapters_of_peft_are_read_onto_meshes_and_in_other_dtypes(tmp_path: Path):
    folder, mesh = opened("conv1d_dora", tmp_path / "adapters"), zoo.make_mesh("fsdp=4")
    alone, sharded = zoo.load(folder), zoo.load(folder, mesh=mesh)
    leaves = jax.tree_util.tree_leaves_with_path(sharding.shardings(sharded, mesh))
    wanted = {keystr(path): where for path, where in leaves}
    for path, array in arrays(alone).items():
        np.testing.assert_array_equal(arrays(sharded)[path], array)
        assert arrays(sharded)[path].sharding.is_equivalent_to(wanted[path], array.ndim), path
    for dtype in (None, "bf16"):
        loaded, skeleton = zoo.load(folder, dtype=dtype), models.skeleton(folder, dtype=dtype)
        assert jax.tree.structure(loaded) == jax.tree.structure(skeleton)
        both = zip(jax.tree.leaves(loaded), jax.tree.leaves(skeleton), strict=True)
        assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in both)


FAMILIES = {
    "bert": ["encoder.layer.0.output.dense", "self.query"],
    "gpt2": ["mlp.c_proj", "c_attn"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_name_their_modules(family: str, tmp_path: Path):
    base = GOLDEN / "hf" / family
    model = zoo.load(base)
    config = lora.Config(2, 3.0, ("blocks.mlp.w_down", "blocks.attention.wq"))
    adapted = drawn(model, config)
    zoo.save_adapters(tmp_path / "adapters", adapted, base=base)
    values = json.loads((tmp_path / "adapters" / CONFIG).read_text())
    for wanted in FAMILIES[family]:
        ends = [name for name in values["target_modules"] if f".{wanted}".endswith(f".{name}")]
        assert len(ends) == 1, values["target_modules"]
    assert values["task_type"] == ("FEATURE_EXTRACTION" if family == "bert" else "CAUSAL_LM")
    assert values["fan_in_fan_out"] == (family == "gpt2")
    again = zoo.load(tmp_path / "adapters")
    merged, found, before = (arrays(merge(x)) for x in (adapted, again, model))
    for path in config.targets:
        assert np.abs(merged[path] - before[path]).max() > 0.1
        np.testing.assert_allclose(found[path], merged[path], atol=1e-6)


@pytest.mark.parametrize(
    ("family", "targets", "dora"),
    [
        ("helium", ("q_proj", "o_proj"), True),  # rotary pairs in another order
        ("qwen3_next", ("q_proj", "k_proj"), False),  # heads' queries and gates in turn
        ("phi3", ("qkv_proj", "gate_up_proj"), True),  # one module for several, of unequal sizes
        ("gpt_neox", ("query_key_value",), False),  # each head's queries, keys and values
        ("deepseek_v3", ("kv_b_proj", "kv_a_proj_with_mqa"), False),  # latent attention's
    ],
)
def test_rows_in_another_order_have_the_adapters_of_peft(
    family: str, targets: tuple, dora: bool, tmp_path: Path
):
    base = GOLDEN / "hf" / family
    model = zoo.load(base)
    adapted = drawn(model, with_paths(lora.Config(2, 3.0, targets, dora=dora), model))
    zoo.save_adapters(tmp_path / "adapters", adapted, base=base)
    merged = merge(adapted)
    zoo.save(tmp_path / "merged", merged, format="hf")  # as the type that it came from
    written = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    for key, value in sums_of_peft(tmp_path / "adapters", base).items():
        np.testing.assert_allclose(written[key], value, rtol=1e-5, atol=1e-5, err_msg=key)
    again = arrays(merge(zoo.load(tmp_path / "adapters")))
    for path, value in arrays(merged).items():
        np.testing.assert_allclose(again[path], value, atol=1e-6, err_msg=path)


def test_adapters_that_peft_has_not_are_refused(tmp_path: Path):
    save = lambda model, targets, **options: zoo.save_adapters(
        tmp_path / "a", drawn(model, lora.Config(2, targets=targets, **options)), base="base"
    )
    experts = zoo.load(GOLDEN / "hf" / "granitemoe")
    save(experts, ("blocks.attention.wq",))
    for path in ("blocks.mlp.w_up", "blocks.mlp.router"):
        with pytest.raises(PublishError, match=rf"no adapters on {path}: versions of transformers"):
            save(experts, (path,))
    experts = zoo.load(GOLDEN / "peft" / "moe")
    with pytest.raises(PublishError, match=r"dense_mlp.w_down: .* PEFT"):
        save(experts, ("blocks.dense_mlp.w_down",))
    with pytest.raises(PublishError, match=r"blocks.mlp.w_up: .* DoRA"):
        save(experts, ("blocks.mlp.w_up",), dora=True)
    with pytest.raises(PublishError, match=r"embedding.weight: .* Linear"):
        save(drawn_transformer(), ("embedding.weight",))
    with pytest.raises(PublishError, match=r"DoRA for all 3 matrices .* only blocks.attention.wq"):
        save(zoo.load(GOLDEN / "hf" / "gpt2"), ("blocks.attention.wq",), dora=True)
    own = drawn_transformer(experts=ExpertsConfig(4, num_shared=1))
    with pytest.raises(PublishError, match=r"blocks.mlp.w_up: .* along layer"):
        save(own, ("blocks.mlp.w_up",))
    members = Ensemble(make_rnn(0.0), 2, key=KEY)
    with pytest.raises(PublishError, match="matrices along member"):
        save(members, ())


def test_modules_of_models_that_hugging_face_lacks_are_paths(tmp_path: Path):
    """What A, B and the scale say, by the file alone, is what the merged model has."""
    config = mlp.Config(in_size=4, out_size=2, hidden_size=8, num_layers=5)
    base = mlp.MLP(config, key=KEY)
    adapted = drawn(base, lora.Config(2, 3.0, targets=("blocks.up.*", "head.*")))
    zoo.save(tmp_path / "base", base)
    zoo.save_adapters(tmp_path / "a", adapted, base=tmp_path / "base")
    values = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert (values["peft_type"], values["r"], values["lora_alpha"]) == ("LORA", 2, 3)
    assert values["target_modules"] == ["head", "up.linear"]
    tensors = safetensors.numpy.load_file(tmp_path / "a" / WEIGHTS)
    modules = ["head", *(f"blocks.{i}.up.linear" for i in range(2))]
    ends = ("lora_A.weight", "lora_B.weight")
    assert {*tensors} == {f"base_model.model.{x}.{end}" for x in modules for end in ends}
    merged = zoo.lora.merge(adapted)
    for i in range(2):
        down, up = (tensors[f"base_model.model.blocks.{i}.up.linear.{end}"] for end in ends)
        wanted = base.blocks.up.linear.weight[i] + 1.5 * (up @ down).T
        np.testing.assert_allclose(merged.blocks.up.linear.weight[i], wanted, atol=1e-5)
    assert_trees_close(zoo.load(tmp_path / "a"), adapted, rtol=0)


REFUSED = {
    "method": ({"peft_type": "IA3"}, r"peft_type='IA3' is not supported, only 'LORA'"),
    "bias": ({"bias": "all"}, r"options that the zoo lacks: bias='all'"),
    "whole modules": ({"modules_to_save": ["norm"]}, r"has 'norm', and the zoo retrains emb"),
    "other bases": ({"init_lora_weights": "pissa"}, r"lacks: init_lora_weights='pissa'"),
    "unknown": ({"new_option": 3}, r"lacks: new_option=3"),
    "targets": (
        {"target_modules": ["query"]},
        r"\('query',\) matches no matrix .*self_attn.q_proj",
    ),
    "no targets": ({"target_modules": None}, r"target_modules=None: PEFT's defaults change"),
    "embedding": (
        {"target_modules": ["embed_tokens"], "layers_to_transform": None},
        r"on embedding.weight: an embedding is no",
    ),
    "rank": ({"r": 4}, r"q_proj.lora_A.weight: \(3, 20\) here, \(4, 20\) by the configuration"),
    "type": ({"r": "4"}, r"r='4': must be an integer"),
    "zero": ({"r": 0}, r"r=0, lora_alpha=6.0: must be positive"),
    "pattern": ({"rank_pattern": {"(": 2}}, r"adapter_config.json: .*unterminated subpattern"),
    "rank's": ({"rank_pattern": {"q_proj": -2}}, r"rank_pattern\['q_proj'\]=-2: must be positive"),
    "dora": ({"use_dora": True, "layers_to_transform": [0]}, r"use_dora=True .* some layers"),
    "base": ({"base_model_name_or_path": None}, r"names no base_model_name_or_path: load that"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_other_configurations_of_peft_are_refused(mistake: str, tmp_path: Path):
    changes, message = REFUSED[mistake]
    folder = opened("some_layers", tmp_path / "adapters")
    if mistake == "dora":
        edit_tensors(folder, lambda tensors: [tensors.pop(x) for x in [*tensors] if ".2." in x])
        changes = {**changes, "target_modules": ["q_proj", "v_proj"]}
        edit_tensors(
            folder,
            lambda tensors: tensors.update(
                {
                    name.replace("lora_B.weight", "lora_magnitude_vector"): x[:, 0].copy()
                    for name, x in [*tensors.items()]
                    if "lora_B" in name
                }
            ),
        )
    edit(folder, **changes)
    with pytest.raises(PublishError, match=message):
        zoo.load(folder)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("tied_whole", {"ensure_weight_tying": False}, r"without ensure_weight_tying=True PEFT"),
        ("tokens", {"trainable_token_indices": [36, 3, 99]}, "37 rows of embed_tok"),
        ("tokens", {"trainable_token_indices": [36, 3, 3]}, r"each is there once"),
        ("tokens", {"trainable_token_indices": {"lm_head": [1]}}, r"has 'lm_head', and the zoo"),
        ("whole", {"trainable_token_indices": [1]}, r"which modules_to_save does not have"),
        ("tokens", {"target_parameters": ["mlp.experts.down_proj"]}, r"target_parameters has 'mlp"),
    ],
)
def test_other_rows_and_modules_of_peft_are_refused(name, changes, match, tmp_path: Path):
    edit(opened(name, tmp_path / "adapters"), **changes)
    with pytest.raises(PublishError, match=match):
        zoo.load(tmp_path / "adapters")


def test_other_tensors_are_refused(tmp_path: Path):
    name = "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"
    changes = {
        rf"{name}: none here, \(12, 3\) by": lambda x: x.pop(name),
        rf"{name}: \(12, 2\) here, \(12, 3\) by": lambda x: x.update({name: x[name][:, :2].copy()}),
        r"lm_head.weight: \(37, 20\) here, none": lambda x: x.update(
            {"base_model.model.lm_head.weight": np.zeros((37, 20), np.float32)}
        ),
        "tensors of type int32": lambda x: x.update({k: y.astype(np.int32) for k, y in x.items()}),
    }
    for i, (message, change) in enumerate(changes.items()):
        folder = opened("some_layers", tmp_path / f"{i}")
        edit_tensors(folder, change)
        with pytest.raises(PublishError, match=message):
            zoo.load(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(PublishError, match=r"adapter_model\.safetensors is missing"):
        zoo.load(folder)


# --- Targets ----------------------------------------------------------------------------------


def test_targets_have_the_names_of_peft():
    llama, gpt2 = (zoo.load(GOLDEN / "peft" / name) for name in ("llama", "gpt2"))
    paths = lambda model, *names: with_paths(lora.Config(targets=names), model).targets
    attention = ("blocks.attention.wq", "blocks.attention.wv")
    assert paths(llama, "q_proj", "v_proj") == paths(llama, "q_proj,v_proj") == attention
    assert paths(llama, "self_attn.q_proj", "blocks.mlp.*") == (attention[0], "blocks.mlp.*")
    assert paths(llama, "all-linear") == tuple(lora.targets(llama, lora.Config()))
    assert paths(llama, "lm_head") == ("head.weight",)
    assert paths(llama) == ()
    parts = tuple(f"blocks.attention.w{x}" for x in "qkv")
    assert paths(gpt2, "c_attn") == parts
    assert {*paths(gpt2, "c_proj")} == {"blocks.attention.wo", "blocks.mlp.w_down"}
    assert paths(gpt2, "attn.c_proj") == ("blocks.attention.wo",)
    with pytest.raises(ValueError, match=r"targets='query' .* blocks.mlp.w_up, .* q_proj, .*'all-"):
        paths(llama, "q_proj", "query")
    rnn = make_rnn(0.0)(KEY)
    assert paths(rnn, "all-linear") == tuple(lora.targets(rnn, lora.Config()))
    with pytest.raises(ValueError, match="targets='q_proj'"):
        paths(rnn, "q_proj")


# --- Bases ------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path):
    """A base, and a folder of adapters of it."""
    base = drawn_transformer(vocab_size=ByteTokenizer().vocab_size)
    zoo.save(tmp_path / "base", base, tokenizer=ByteTokenizer())
    adapted = drawn(base, lora.Config(rank=2))
    zoo.save_adapters(tmp_path / "a", adapted, base=tmp_path / "base")
    return tmp_path, base, adapted


def test_another_base_of_the_same_shape_is_refused(saved):
    folder, base, adapted = saved
    other = eqx.tree_at(lambda m: m.final_norm.scale, base, base.final_norm.scale * 1.01)
    assert_trees_close(zoo.load(folder / "a"), adapted, rtol=0)
    for dtype in ("bf16", "fp16"):
        assert lora.has_adapters(zoo.load(folder / "a", dtype=dtype))
    zoo.save(folder / "base", other)
    with pytest.raises(PublishError, match=r"base has other weights than the model of that"):
        zoo.load(folder / "a")
    zoo.load_adapters(folder / "a", other)  # a model at hand is its owner's choice


def test_adapters_without_a_checksum_open(saved):
    folder, base, adapted = saved
    zoo.save_adapters(folder / "b", adapted, base="nobody/nothing")
    assert base_in(folder / "b").checksum is None
    edit_tensors(folder / "b", lambda tensors: None)  # drops the metadata
    (folder / "b" / "checksums.json").unlink()
    assert base_in(folder / "b") == formats.Base("nobody/nothing")
    assert_trees_close(zoo.load_adapters(folder / "b", base), adapted, rtol=0)


def logits(model) -> np.ndarray:
    return np.asarray(model(jnp.arange(24, dtype=jnp.int32)[None]))


@pytest.mark.slow
def test_adapters_know_how_their_base_was_quantised(saved, caplog):
    folder, base, _ = saved
    quantised = zoo.load(folder / "base", quantize="int4")
    adapted = drawn(quantised, lora.Config(rank=2))
    zoo.save_adapters(folder / "q", adapted, base=folder / "base")
    same = zoo.load(folder / "q", quantize="int4")
    assert not caplog.messages
    np.testing.assert_allclose(logits(same), logits(adapted), atol=1e-5)
    for load in (zoo.load, lambda folder: zoo.load_adapters(folder, base)):
        other = load(folder / "q")
        assert np.abs(logits(other) - logits(adapted)).max() > 0.1
        assert len(caplog.messages) == 1
        assert "int4, int8 and now is not quantised" in caplog.messages[0]
        assert "load it with quantize='int4'" in caplog.messages[0]
        caplog.clear()
    zoo.load(folder / "a", quantize="int8")
    assert "was not quantised and now is int8: load it with quantize=None" in caplog.text


def edit_origin(folder: Path, value) -> None:
    """Change what a folder says of its adapters' base."""
    with safetensors.safe_open(folder / WEIGHTS, "numpy") as file:
        origin = json.loads(file.metadata()["zoo"])
    if isinstance(value, dict):
        value = (origin if isinstance(origin, dict) else {}) | value
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    safetensors.numpy.save_file(tensors, folder / WEIGHTS, {"zoo": json.dumps(value)})
    checksums.write(folder)


def test_adapters_carry_the_ends_of_texts(saved):
    folder, base, adapted = saved
    assert (base.config.eos_ids, zoo.load(folder / "base").config.eos_ids) == ((), (256,))
    ended = families.with_more_ends(adapted, (256, 7))
    zoo.save_adapters(folder / "e", ended, base=folder / "base")
    opened = zoo.load(folder / "e")
    assert opened.config.eos_ids == (256, 7)
    assert_trees_close(opened, adapted, rtol=0)
    assert models.skeleton(folder / "e").config.eos_ids == (256, 7)
    edit_origin(folder / "e", {"eos_ids": [7, 257]})
    with pytest.raises(PublishError, match=r"eos_ids .* 257: .* vocab_size=257"):
        zoo.load(folder / "e")


def test_revisions_of_hub_ids_are_kept(tmp_path: Path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit
    zoo.save(snapshot, drawn_transformer())
    asked = []

    def download(name, *, revision=None, local_files_only=False, **rest):
        asked.append((revision, local_files_only))
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    adapted = drawn(zoo.load(snapshot), lora.Config(rank=2))
    zoo.save_adapters(tmp_path / "a", adapted, base="some/model")
    assert asked == [(None, True)]  # nothing is downloaded to save
    assert base_in(tmp_path / "a").revision == commit
    assert base_in(tmp_path / "a").checksum == models.weights_checksum(snapshot)
    assert_trees_close(zoo.load(tmp_path / "a"), adapted, rtol=0)
    assert asked[-1] == (commit, False)


def test_adapters_on_themselves_are_refused(saved):
    """Each way from adapters to what they are on ends, and names the folders."""
    folder, base, adapted = saved
    for name, on in ("ab", "bc", "cb"):
        zoo.save_adapters(folder / name, adapted, base="nobody/nothing")
        edit(folder / name, base_model_name_or_path=str(folder / on))
        checksums.write(folder / name)
    names = " on ".join(str(folder / name) for name in "abcb")
    ways = (
        zoo.load,
        models.skeleton,
        shelf.whole,
        shelf.weights_checksum,
        lambda a: shelf.nearest(a, "vocab.json"),
        lambda a: zoo.save(folder / "d", base, like=a),
    )
    for follow in ways:
        with pytest.raises(PublishError, match=rf"c: the base .*b', is on them again \({names}\)"):
            follow(folder / "a")
    edit(folder / "a", base_model_name_or_path=str(folder / "a"))
    checksums.write(folder / "a")
    with pytest.raises(PublishError, match="is this folder itself"):
        zoo.load(folder / "a")


@pytest.mark.slow
def test_adapters_on_adapters(saved):
    folder, base, first = saved
    second = drawn(zoo.load(folder / "a"), lora.Config(rank=3, targets=("blocks.mlp.*",)))
    with pytest.raises(PublishError, match=r"base=.*base' has none"):
        zoo.save_adapters(folder / "b", second, base=folder / "base")
    zoo.save_adapters(folder / "b", second, base=folder / "a")
    loaded = zoo.load(folder / "b")
    assert np.abs(second(TOKENS) - first(TOKENS)).max() > 0.01
    np.testing.assert_array_equal(loaded(TOKENS), second(TOKENS))
    np.testing.assert_allclose(lora.merge(loaded)(TOKENS), second(TOKENS), atol=1e-5)
    # The tokenizer and the format are found in the model that all of them are on.
    assert shelf.whole(folder / "b") == folder / "base"
    tokenizer = load_tokenizer(shelf.nearest(folder / "b", "tokenizer.json"))
    assert tokenizer.encode("a").tolist() == [97]
    # Several of one base, at once: their sum.
    third = drawn(base, lora.Config(rank=1, targets=("blocks.attention.wo",)))
    zoo.save_adapters(folder / "d", third, base=folder / "base")
    both = zoo.load_adapters(folder / "d", zoo.load(folder / "a"))
    wo = [lora.merge(x).blocks.attention.wo for x in (both, first, third, base)]
    np.testing.assert_allclose(wo[0], wo[1] + wo[2] - wo[3], atol=1e-5)


def test_malformed_bases_are_refused(saved):
    folder = saved[0] / "a"
    for value in (None, [], 3, {"weights": 3}, {"quantized": [3]}, {"eos_ids": "7"}):
        edit_origin(folder, value)
        with pytest.raises(PublishError, match=r"adapter_config.json or .*: base.*: must be"):
            zoo.load(folder)


def test_malformed_configurations_are_refused(saved):
    path, refused = saved[0] / "a" / CONFIG, 0
    good = json.loads(path.read_text())
    for name in ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules"):
        for value in (..., None, [], {}, "foo", -1, 10**9, 10**400, True, 0.5, [[]]):
            if name == "lora_alpha" and value in (..., 10**9, 0.5):
                continue  # as good as others
            values = {key: x for key, x in {**good, name: value}.items() if x is not ...}
            path.write_text(json.dumps(values))
            checksums.write(path.parent)
            with pytest.raises(PublishError):
                zoo.load(path.parent)
            refused += 1
    assert refused == 5 * 11 - 3


# --- PEFT itself ------------------------------------------------------------------------------

QV = ("blocks.attention.wq", "blocks.attention.wv")
WRITTEN = {
    "llama": ("llama", lora.Config(3, 7.0)),
    "qwen2": ("qwen2", lora.Config(3, 5.0, rank_stabilized=True, dora=True)),
    "gpt2": ("gpt2", lora.Config(3, 7.0, (*QV, "blocks.mlp.*"))),
    "experts": ("moe", lora.Config(3, 7.0, (*QV, "blocks.mlp.w_*"))),
    "experts of other names": ("../hf/mixtral", lora.Config(3, 7.0, (*QV, "blocks.mlp.w_*"))),
    "one of the experts' matrices": ("moe", lora.Config(3, 7.0, ("blocks.mlp.w_up",))),
    **{name: (f"../hf/{name}", lora.Config(3, 7.0)) for name in ("opt", "ministral3", "apertus")},
    "head": ("llama", lora.Config(3, 7.0, (*QV, "head.weight"))),
    "tokens": ("llama", lora.Config(3, 7.0, QV, tokens=(3, 36, 11))),
    "tied tokens": ("qwen2", lora.Config(3, 7.0, QV, tokens=(3, 30))),
    "gpt2's tokens": ("gpt2", lora.Config(3, 7.0, QV, tokens=(4, 1))),
    "whole": ("llama", lora.Config(3, 7.0, QV, whole=("embedding.weight", "head.weight"))),
    "tied whole": ("qwen2", lora.Config(3, 7.0, QV, whole=("embedding.weight",))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_peft_opens_adapters_of_the_zoo(name: str, tmp_path: Path):
    torch = pytest.importorskip("torch", reason="pip install 'zoo[interop]' to compare with PEFT")
    peft = pytest.importorskip("peft", reason="pip install 'zoo[interop]' to compare with PEFT")
    transformers = pytest.importorskip("transformers", reason="pip install 'zoo[interop]'")
    folder, config = WRITTEN[name]
    base = GOLDEN / "peft" / folder
    model = drawn(zoo.load(base), config)
    zoo.save_adapters(tmp_path / "adapters", model, base=base)
    eager = {"experts_implementation": "eager"}  # for sizes that are no multiple of 4
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, **eager)
    ids = torch.from_numpy(np.asarray(TOKENS, np.int64))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT's: of unknown fields, lost tensors, …
        before = plain(ids).logits.numpy()
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
        logits = theirs(ids).logits.numpy()
    np.testing.assert_allclose(model(TOKENS), logits, atol=1e-5)
    assert np.abs(logits - before).max() > 0.1
    theirs.save_pretrained(tmp_path / "again")
    again = merge(zoo.load_adapters(tmp_path / "again", zoo.load(base)))
    np.testing.assert_allclose(again(TOKENS), logits, atol=1e-5)
    named = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters", **eager)
    with torch.no_grad():
        np.testing.assert_allclose(named(ids).logits.numpy(), logits, atol=1e-6)
