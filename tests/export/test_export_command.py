"""`python -m zoo export`."""

from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from test_gguf_tokens import of_bytes

import zoo
from zoo import lora, transformer
from zoo.__main__ import main
from zoo.publishing import PublishError

SIZES = {"vocab_size": 720, "d_model": 32, "num_layers": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = transformer.Transformer(transformer.Config(**SIZES), key=jax.random.key(0))
    zoo.save(folder, model, tokenizer=of_bytes("gpt-2"))
    return folder


def weight(path: Path, name: str) -> np.ndarray:
    [tensor] = [x for x in gguf.GGUFReader(path).tensors if x.name == name]
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def test_a_folder_with_its_tokenizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    main(["export", str(folder), "--to", "gguf"])
    assert "tiny-f16.gguf" in capsys.readouterr().out
    reader = gguf.GGUFReader(tmp_path / "tiny-f16.gguf")
    assert reader.get_field("general.name").contents() == "tiny"
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == SIZES["vocab_size"]
    with pytest.raises(PublishError, match=r"tiny-f16\.gguf' is there already"):
        main(["export", str(folder)])


def test_adapters_are_merged(folder: Path, tmp_path: Path):
    model = lora.adapt(zoo.load(folder), lora.Config(rank=2), key=jax.random.key(0))
    leaves, tree = jax.tree.flatten(model)
    model = jax.tree.unflatten(tree, [x + 0.1 for x in leaves])
    zoo.save_adapters(tmp_path / "adapters", model, base=folder)
    out = tmp_path / "x.gguf"
    main(["export", str(tmp_path / "adapters"), "--type", "f32", "--out", str(out)])
    merged = lora.merge(zoo.load(tmp_path / "adapters"))
    up = np.asarray(merged.blocks.mlp.w_up[0], np.float32).T
    np.testing.assert_array_equal(weight(out, "blk.0.ffn_up.weight"), up)
    plain = np.asarray(zoo.load(folder).blocks.mlp.w_up[0]).T
    assert np.abs(up - plain).max() > 1e-3


def test_the_shelf_without_a_tokenizer(tmp_path: Path):
    with pytest.raises(PublishError, match="--no-tokenizer"):
        main(["export", "lm-python", "--out", str(tmp_path / "x.gguf")])
    assert not [*tmp_path.iterdir()]
    main(["export", "lm-python", "--no-tokenizer", "--out", str(tmp_path / "x.gguf")])
    assert weight(tmp_path / "x.gguf", "token_embd.weight").shape == (2048, 256)


def test_a_folder_without_a_tokenizer(tmp_path: Path):
    model = transformer.Transformer(transformer.Config(**SIZES), key=jax.random.key(0))
    zoo.save(tmp_path / "tiny", model)
    with pytest.raises(PublishError, match=r"no tokenizer\.json"):
        main(["export", str(tmp_path / "tiny"), "--out", str(tmp_path / "x.gguf")])
