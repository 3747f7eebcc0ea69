"""Small prepared corpora: of random ids, and the same in one shard; of the rows of files."""

import numpy as np

from zoo import text
from zoo.data.corpus import Corpus, parts_of
from zoo.data.prepared import format
from zoo.data.prepared.format import RECORD, PartRecord, ShardRecord
from zoo.data.prepared.tokenizing import counted_bytes
from zoo.data.rows import encode_parts, read_rows
from zoo.data.splits import plan_splits
from zoo.data.tokenizer import ByteTokenizer

VOCAB, SEPARATOR = 300, 299
LENGTHS = [5, 0, 17, 1, 40, 8, 8, 3, 100, 2, 9]


def make_parts(folder, lengths=LENGTHS, num_shards=3, frame=2, vocab_size=VOCAB, seed=0):
    """(the parts, corpora of the same documents): every fourth document is held out.

    `lengths` may be the documents themselves.
    """
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(0, vocab_size - 1, n)
    documents = [given if isinstance(given, np.ndarray) else draw(given) for given in lengths]
    lengths = [len(document) for document in documents]
    held = [i % 4 == 3 for i in range(len(documents))]
    (folder / "shards").mkdir(parents=True)
    records, stored = [], {"train": [], "held_out": []}
    for number, own in enumerate(np.array_split(np.arange(len(documents)), num_shards)):
        stem = folder / "shards" / f"{number:08}"
        tokens = np.concatenate([np.zeros(0, int), *(documents[i] for i in own)]).astype("<u2")
        stem.with_suffix(".tokens").write_bytes(tokens.tobytes())
        starts = dict(zip(own.tolist(), np.cumsum([0, *(lengths[i] for i in own)]), strict=False))
        summary = {}
        for part in stored:
            chosen = [int(i) for i in own if held[i] == (part == "held_out")]
            rows, end = np.zeros(len(chosen), RECORD), 0
            for row, i in zip(rows, chosen, strict=True):
                end += max(lengths[i] + frame - 1, 0)
                row["start"], row["length"], row["end"] = starts[i], lengths[i], end
                row["source"], row["record"] = i % 2, i
            stem.with_suffix(f".{part}").write_bytes(rows.tobytes())
            stored[part] += [documents[i] for i in chosen]
            count = sum(lengths[i] for i in chosen)
            summary[part] = PartRecord(len(chosen), count, count, end, count)
        stem.with_suffix(".sources.json").write_text('["a.txt", "b.jsonl"]')
        digest = format.write_sums(stem, [".tokens", ".train", ".held_out"])
        records.append(ShardRecord(tokens.nbytes, **summary, sums=digest, sources=""))
    ByteTokenizer().save(folder / format.TOKENIZER)
    digest = format.tokenizer_digest(folder / format.TOKENIZER)
    manifest = format.Manifest(
        {"held_out": 0.05}, digest, "uint16", vocab_size, frame, tuple(records)
    )
    (folder / format.MANIFEST).write_text(format.manifest_text(manifest))
    corpora = [Corpus.from_arrays(stored[part], vocab_size, 1) for part in stored]
    stem_of = lambda number: folder / format.SHARDS / f"{number:08}"
    return parts_of(manifest, stem_of), corpora


def rows_in(pattern, format, make_template=None, names=None):
    """The rows of all matching files."""
    [split] = plan_splits(pattern, shard_bytes=2**30)
    return [*read_rows(split, format, make_template, names)]


def corpus_of(rows, tokenizer, file="rows.jsonl"):
    """The corpus of the rows' examples, in their order."""
    form, examples = rows[0].form, [parts for row in rows for parts in row.examples]
    encoded = [encode_parts(tokenizer, parts, is_chat=form.is_chat) for parts in examples]
    names = [f"{file}:{row.record}" for row in rows for _ in row.examples]
    return Corpus.from_arrays(
        [ids for ids, _ in encoded],
        tokenizer.vocab_size,
        sum(map(counted_bytes, examples)),
        names,
        [counted for _, counted in encoded],
        framed=form.is_chat,
    )


def reading(tmp_path, files, options):
    """(the configuration to read files as a run in `tmp_path` does, where it keeps a tokenizer)."""

    def tokenizer_folder(make):
        kept = tmp_path / "run" / "tokenizer"
        if not kept.exists():
            make(kept)
        return kept

    (tmp_path / "run").mkdir(exist_ok=True)
    given = {"seq_len": 16, "batch_size": 4, "tokenizer": "bpe", "cache": tmp_path / "cache"}
    return text.Config(files=str(files), **(given | options)), tokenizer_folder
