"""Rows of text for the decoders: the standard library, tokenized and packed by the zoo."""

from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.corpus import tokenize
from zoo.data.documents import standard_library
from zoo.data.token_plans import PackedPlan
from zoo.data.tokenizer import BPETokenizer


def write(vocab_size: int, rows: int, seq_lens: list[int], folder: str, share: float) -> Any:
    """Write `<seq_len>.npy`, [rows, seq_len + 1], for each length; returns the sizes of the text.

    The tokenizer is trained on a `share` of the documents, and only these are tokenized.
    """
    documents = standard_library()
    documents = documents[: max(2, int(share * len(documents)))]
    tokenizer = BPETokenizer.train((document.text for document in documents), vocab_size)
    corpus = tokenize(documents, tokenizer)
    for seq_len in seq_lens:
        plan = PackedPlan(corpus, tokenizer.separator_id, seq_len + 1, rows, seed=0)
        np.save(Path(folder, f"{seq_len}.npy"), plan.batch(0)["tokens"])
    return {"tokens": len(corpus.tokens), "vocabulary": tokenizer.vocab_size}
