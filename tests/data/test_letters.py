import json

import pytest
from model_folders import write_esm

from zoo.data.tokenizer import has_tokenizer, load_tokenizer


def test_ids_are_those_of_esms_own_tokenizer(tmp_path):
    write_esm(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    # What transformers 5.24 gives for these texts.
    text, ids = "MKTV<mask>A JJA", [0, 20, 15, 11, 7, 32, 5, 3, 5, 2]
    assert tokenizer.tokenizer.encode(text).ids == ids
    assert tokenizer.tokenizer.encode("mkX").ids == [0, 3, 24, 2]
    assert (tokenizer.begin_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (2,), 1)
    assert (tokenizer.vocab_size, tokenizer.unknown_id) == (33, 3)
    assert tokenizer.is_of_letters
    assert tokenizer.special_ids == {0, 1, 2, 3, 31, 32}
    assert tokenizer.encode("MKT").tolist() == [20, 15, 11]
    assert tokenizer.encode("<mask>").tolist() == [3]  # the name of a special token in a text
    assert tokenizer.encode_spans("M KT")[1].tolist() == [[0, 1], [2, 3], [3, 4]]
    # It is saved as a tokenizer.json beside the vocabulary.
    tokenizer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "vocab.txt").read_bytes() == (tmp_path / "vocab.txt").read_bytes()
    again = load_tokenizer(tmp_path / "saved")
    assert (again.tokenizer.encode(text).ids, again.config) == (ids, tokenizer.config)
    assert json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text()) == {
        "cls_token": "<cls>",
        "eos_token": "<eos>",
        "mask_token": "<mask>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "tokenizer_class": "EsmTokenizer",
    }


def test_a_vocabulary_is_of_letters_where_a_file_says_so(tmp_path):
    write_esm(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert has_tokenizer(tmp_path)  # by model_type
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert not has_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    (tmp_path / "vocab.txt").write_text("<cls>\n<pad>\n<eos>\nA")
    with pytest.raises(ValueError, match="has no <mask>, which ESM's tokenizer has"):
        load_tokenizer(tmp_path)
