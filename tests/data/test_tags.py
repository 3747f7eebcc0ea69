import json

import numpy as np
import pytest
from model_folders import write_esm
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers

from zoo.data import rows, text
from zoo.data.labelled import TaggedDataset
from zoo.data.prepared.opening import open_text
from zoo.data.tags import encode_tags, of_tags
from zoo.data.tokenizer import BPETokenizer, load_tokenizer

CLASSES = ["B-PER", "O"]


@pytest.fixture
def pieces():
    """A tokenizer of pieces of words."""
    vocabulary = ["[CLS]", "[SEP]", "[UNK]", "Ad", "##a", "wrote", ",", "code"]
    model = models.WordPiece({x: i for i, x in enumerate(vocabulary)}, unk_token="[UNK]")
    tokenizer = HFTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return BPETokenizer(tokenizer, None, {"cls_token": "[CLS]", "sep_token": "[SEP]"})


def test_a_words_first_token_has_its_tag(pieces):
    record = {"text": ["Ada", "wrote", "a,code"], "tags": ["B-PER", "O", "O"]}
    [parts] = of_tags(record, None)
    assert "".join(x for x, _ in parts) == "Ada wrote a,code"
    ids, codes = encode_tags(pieces, parts, CLASSES)
    assert ids.tolist() == [3, 4, 5, 2, 6, 7]
    assert codes.tolist() == [1, 0, 2, 2, 0, 0]


def test_each_letter_has_a_tag(tmp_path, pieces):
    write_esm(tmp_path)
    [parts] = of_tags({"text": "MKT", "tags": "HHC"}, None)
    ids, codes = encode_tags(load_tokenizer(tmp_path), parts, ["C", "H"])
    assert (ids.tolist(), codes.tolist()) == ([20, 15, 11], [2, 2, 1])
    with pytest.raises(ValueError, match="'d' at character 1"):
        encode_tags(pieces, [("A", "O"), ("d", "O")], CLASSES)


@pytest.mark.parametrize(
    ("words", "tags", "message"),
    [
        ("MKT", "HH", "there are 3 letters and 2 tags:"),
        (["a", "b"], ["O"], "there are 2 words and 1 tags"),
        (["a", ""], ["O", "O"], r"'' among .* tags"),
        (["a", "b"], ["O", 3], r"3 among .* tags"),
        ("", "", r"text is '' .* tags ''"),
        (5, "H", r"text is 5 .* tags 'H'"),
    ],
)
def test_tags_that_do_not_fit_are_refused(words, tags, message):
    with pytest.raises(ValueError, match=message):
        of_tags({"text": words, "tags": tags}, None)


def test_rows_of_tags_become_batches(tmp_path):
    write_esm(tmp_path)
    letters = np.random.default_rng(0).choice([*"ACDEFGHIKLMNPQRSTVWY"], (40, 12))
    sequences = ["".join(row[: 3 + i % 10]) for i, row in enumerate(letters)]
    tags_of = lambda s: "".join("H" if x in "AELM" else "C" for x in s)
    content = "\n".join(f"{s},{tags_of(s)}" for s in sequences)
    (tmp_path / "a.csv").write_text(f"sequence,structure\n{content}\n")
    config = text.Source(
        files=f"{tmp_path}/a.csv",
        rows="bucketed",
        buckets=(8, 16),
        batch_size=4,
        held_out=0.2,
        cache=tmp_path / "cache",
    )
    names = {"text": "sequence", "tags": "structure"}
    given = {"format": "tags", "names": names, "now": None}
    given["classes"] = rows.tags_in(config.files, names)
    assert given["classes"] == ["C", "H"]
    tokenizer = load_tokenizer(tmp_path)
    prepared = open_text(config, config, tokenizer, rows=given)
    data = text.prepared_text(config, prepared, seed=0)
    assert data.classes == ("C", "H")
    seen = []
    for part in (data.train, data.held_out):
        assert isinstance(part, TaggedDataset)
        for k in range(part.batches_per_epoch):
            batch = part.batch(k)
            for ids, mask, labels, weights in zip(
                *(batch[name] for name in ("inputs", "mask", "labels", "weights")), strict=True
            ):
                if mask.any():
                    count = int(mask.sum())
                    assert (ids[0], ids[count - 1]) == (0, 2)  # <cls> and <eos>
                    assert mask[:count].all()
                    assert np.flatnonzero(weights).tolist() == [*range(1, count - 1)]
                    sequence = tokenizer.decode(ids[: count - 1]).replace(" ", "")
                    tagged = "".join(data.classes[x] for x in labels[1 : count - 1])
                    assert tagged == tags_of(sequence)
                    seen.append(sequence)
    assert sorted(seen) == sorted(sequences)


def test_rows_of_one_tag_or_without_a_column_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"words": ["a"], "ner": ["O"]}))
    with pytest.raises(ValueError, match=r"tags are \['O'\]: .* 2 to 255"):
        rows.tags_in(str(path), {"text": "words", "tags": "ner"})
    with pytest.raises(ValueError, match=r"line 1: data.format='tags'"):
        rows.tags_in(str(path), {"text": "words", "tags": "pos"})
