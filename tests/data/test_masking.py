"""Masked batches: what is hidden, by what, and that it is the same wherever the batch is made."""

import math

import numpy as np
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers

from zoo.data import masking, token_datasets
from zoo.data.corpus import Corpus
from zoo.data.masking import MaskedDataset
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer

WORDS = ["def", "Ġdef", "ine", "(", "Ġx", "1", ")", "Ġ", "_y", "Ċ"]
SPECIAL = "<|endoftext|>"


def tokenizer(words=WORDS):
    vocabulary = {SPECIAL: 0, **{word: i for i, word in enumerate(words, 1)}}
    made = HFTokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([SPECIAL])
    return BPETokenizer(made, SPECIAL)


def masked(*, seed=0, batch_size=8, seq_len=64, **options):
    found, mask_id = masking.with_mask(tokenizer())
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 11, n).astype(np.int32) for n in (300, 1700, 40, 3000, 77)]
    corpus = Corpus.from_arrays(documents, 64, 5117)
    packed = token_datasets.PackedDataset(corpus, 0, seq_len, batch_size, seed=1)
    return MaskedDataset(packed, masking.Config(**options), found, mask_id, seed), packed, mask_id


def assert_share(count, total, share):
    """Within five standard deviations of a binomial count."""
    assert abs(count - total * share) < 5 * math.sqrt(total * share * (1 - share))


def test_shares_are_as_configured_and_special_tokens_are_seen():
    dataset, packed, mask_id = masked(rate=0.3)
    kinds = dict.fromkeys(("mask", "same", "other"), 0)
    eligible = 0
    for k in range(dataset.batches_per_epoch):
        batch, plain = dataset.batch(k), packed.batch(k)
        hidden = batch["weights"] > 0
        assert np.array_equal(batch["targets"], plain["tokens"])
        assert np.array_equal(batch["tokens"][~hidden], plain["tokens"][~hidden])
        assert not hidden[plain["segment_ids"] == 0].any()
        assert not hidden[plain["tokens"] == 0].any()
        eligible += int(((plain["segment_ids"] > 0) & (plain["tokens"] != 0)).sum())
        given, wanted = batch["tokens"][hidden], batch["targets"][hidden]
        kinds["mask"] += int((given == mask_id).sum())
        kinds["same"] += int((given == wanted).sum())
        kinds["other"] += int(((given != mask_id) & (given != wanted)).sum())
        assert not (given == 0).any()
        for name in ("segment_ids", "positions"):
            assert np.array_equal(batch[name], plain[name])
    total = sum(kinds.values())
    assert_share(total, eligible, 0.3)
    assert_share(kinds["mask"], total, 0.8)
    assert_share(kinds["same"], total, 0.1 + 0.1 / 10)  # one of ten random tokens is the same
    always, *_ = masked(replace="mask")
    batch = always.batch(0)
    assert (batch["tokens"][batch["weights"] > 0] == mask_id).all()
    assert batch["weights"].any()


def test_masks_follow_from_the_seed_k_and_the_row():
    dataset, *_ = masked()
    whole = dataset.batch(3)
    assert whole["weights"].any()
    parts = [masked()[0].batch(3, slice(i, i + 2)) for i in range(0, 8, 2)]
    for name, array in whole.items():
        assert np.array_equal(array, np.concatenate([part[name] for part in parts]))
    assert not np.array_equal(whole["weights"][0], whole["weights"][1])
    assert not np.array_equal(whole["weights"], dataset.batch(4)["weights"])
    other, *_ = masked(seed=1)
    assert not np.array_equal(whole["weights"], other.batch(3)["weights"])
    prints = [masked()[0], masked(seed=1)[0], masked(rate=0.2)[0], masked(whole_words=True)[0]]
    assert len({x.fingerprint for x in prints}) == 4
    assert masked()[0].fingerprint == dataset.fingerprint


def test_words_are_hidden_as_a_whole():
    dataset, packed, _ = masked(whole_words=True, rate=0.3)
    ids = {word: i for i, word in enumerate(WORDS, 1)}
    opens = {ids[w] for w in ("def", "Ġdef", "ine", "Ġx", "1", "_y")}
    goes_on = {ids[w] for w in ("def", "ine", "1", "_y")}
    joined = apart = 0
    for k in range(dataset.batches_per_epoch):
        batch, segments = dataset.batch(k), packed.batch(k)["segment_ids"]
        for tokens, hidden, segment in zip(
            batch["targets"], batch["weights"] > 0, segments, strict=True
        ):
            for i in range(1, len(tokens)):
                one_word = tokens[i - 1] in opens and tokens[i] in goes_on
                if one_word and segment[i - 1] == segment[i] > 0:
                    assert hidden[i - 1] == hidden[i]
                    joined += 1
                elif segment[i] > 0 and tokens[i - 1] and tokens[i]:  # two words
                    apart += int(hidden[i - 1] != hidden[i])
    assert joined > 100
    assert apart > 100


def test_word_pieces_go_on_by_their_mark():
    words = tokenizer(["play", "##ing", "x"])
    goes_on, is_open = masking.parts_of_words(words)
    assert goes_on[1:4].tolist() == [False, True, False]
    assert is_open[1:4].all()
    blanks = tokenizer(["Ġdef", "def", "▁x", "(", "1"])
    goes_on, is_open = masking.parts_of_words(blanks)
    assert goes_on[1:6].tolist() == [False, True, False, False, True]
    assert is_open[1:6].tolist() == [True, True, True, False, True]
    assert not goes_on[0]


def test_a_tokenizer_gets_a_mask_once_and_keeps_it(tmp_path):
    first, mask_id = masking.with_mask(tokenizer())
    assert mask_id == len(WORDS) + 1
    assert mask_id in first.special_ids
    first.save(tmp_path)
    again, same_id = masking.with_mask(masking.with_mask(first)[0])
    assert (same_id, again.vocab_size) == (mask_id, mask_id + 1)
    with pytest.raises(ValueError, match=r"data.tokenizer='bytes'"):
        masking.with_mask(ByteTokenizer())


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_rates_out_of_range_are_named(rate):
    with pytest.raises(ValueError, match=rf"mask.rate={rate}"):
        masking.Config(rate=rate)


def test_rows_without_segments_are_refused():
    class Rows:
        unit, batch_size, buckets, batches_per_epoch = "tokens", 1, (8,), 1

        def row(self, bucket):
            return {"tokens": ((bucket,), np.int32), "targets": ((bucket,), np.int32)}

        def batch(self, k, rows=None):
            raise AssertionError

    found, mask_id = masking.with_mask(tokenizer())
    with pytest.raises(ValueError, match=r"Rows has no \['segment_ids'\]"):
        MaskedDataset(Rows(), masking.Config(), found, mask_id, 0)
