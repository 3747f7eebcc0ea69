"""zoo.hf.folder: parts of models, saving beside the files that came, the hub, and memory."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers import arrays, as_subclass, assert_same, drawn_transformer, with_loud_mlp
from hf_cases import IDS, TYPES, Ends, contents, edit, refusal
from test_hf import CASES, GOLDEN, tensors

import zoo
from zoo import hf, sharding, transformer
from zoo.common import configuration
from zoo.data import tokenizer
from zoo.publishing import PublishError, families


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
    edit(folder, eos_token_id=3)
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
    model = zoo.load(folder)
    assert_same(model, plain)
    assert getattr(model.config, "eos_ids", (3,)) == (3,)
    assert all(content in caplog.text for content in others.values())


def test_bert_pooler_is_optional(copy: Any):
    folder = copy("bert")
    stored = {name: x for name, x in tensors(folder).items() if "pooler" not in name}
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    model = zoo.load(folder)
    with pytest.raises(ValueError, match=r"encoder\.pooler=False"):
        model.pooled(jnp.ones((1, 2, 24)))
    zoo.save(folder.with_name("again"), model, format="hf")
    assert tensors(folder.with_name("again")).keys() == stored.keys()


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


def test_the_processor_of_images_is_kept(copy: Any, tmp_path: Path):
    folder, content = copy("vit"), b'{"size": {"height": 20, "width": 20}}'
    (folder / "preprocessor_config.json").write_bytes(content)
    zoo.save(tmp_path / "again", zoo.load(folder), format="hf", like=folder)
    assert (tmp_path / "again" / "preprocessor_config.json").read_bytes() == content
    assert zoo.images.Processor.of(tmp_path / "again").size == (20, 20)
