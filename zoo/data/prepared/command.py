"""The commands `python -m zoo prepare` and, for a prepared corpus, `python -m zoo verify`."""

from collections.abc import Iterator
from pathlib import Path

import tyro
import xxhash

from zoo.data.corpus import remedy
from zoo.data.prepared import format
from zoo.data.prepared.engines import Engine
from zoo.data.prepared.format import DamagedError, Manifest, Shard, ShardRecord
from zoo.data.prepared.prepare import prepare
from zoo.data.tokenizer import Reading


def main(
    data: tyro.conf.Positional[tuple[str, ...]],
    *,
    out: str,
    tokenizer: str = "bytes",
    vocab_size: int = 2048,
    field: str = "text",
    held_out: float = 0.05,
    special_tokens: Reading = "text",
    workers: int | None = None,
    engine: Engine = "processes",
    shard_megabytes: float = 64.0,
) -> None:
    """Tokenize a corpus of any size once, into a folder that recipes read.

    The same command again goes on after an interruption. For example:
    python -m zoo prepare 'corpus/*.jsonl' --tokenizer bpe --vocab-size 8192 --out prepared

    Args:
        data: Files, globs or addresses (s3://, gs://, hf://): text, .json, .jsonl, .csv, .fasta or
            .parquet, all but the last also as .gz or .zst.
        out: Folder to write.
        tokenizer: bytes, bpe (byte pairs, trained on a sample), or a path to tokenizer.json.
        vocab_size: Number of ids that bpe trains.
        field: Field of a JSON line, or column, that holds the text.
        held_out: Share of the documents kept from training, to evaluate on.
        special_tokens: Reading of special tokens' names in the text, such as <|im_end|>: parse, as
            those tokens; or text, as plain characters.
        workers: Processes side by side; by default one per core.
        engine: Processes of this machine, or tasks of Ray (RAY_ADDRESS names a cluster).
        shard_megabytes: Size of the text of a shard.
    """
    manifest = prepare(
        data,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        field=field,
        held_out=held_out,
        special_tokens=special_tokens,
        shard_megabytes=shard_megabytes,
        workers=workers,
        engine=engine,
        show=True,
    )
    print(summary(manifest, out))


def summary(manifest: Manifest, out: str) -> str:
    """The content of a prepared corpus in words, and how to train on it."""
    lines = [f"{len(manifest.shards):,} shards from {manifest.options['files']:,} files in {out}"]
    for title, part in (("to train on", "train"), ("held out", "held_out")):
        total = manifest.total(part)
        lines.append(
            f"{title + ':':12} {total.documents:,} documents, {total.tokens:,} tokens, "
            f"{total.bytes:,} bytes of text ({total.bytes / total.tokens:.2f} bytes per token)"
        )
    lines.append(f"left out:    {manifest.duplicates:,} exact copies of other documents")
    if manifest.empty:
        lines.append(
            f"             {manifest.empty:,} documents without a token, the first of them "
            f"{manifest.first_empty}"
        )
    if found := manifest.describe_special_tokens("--special-tokens"):
        lines.append(f"             {found}")
    lines.append(f"to train:    python -m recipes.lm --data {out}")
    return "\n".join(lines)


def is_prepared(folder: Path) -> bool:
    """Whether a folder is a prepared corpus, a damaged one too."""
    return (folder / format.MANIFEST).is_file()


def verify(folder: Path) -> tuple[int, list[str]]:
    """(how many files there are, a line per missing or damaged one) of a prepared corpus."""
    try:
        manifest = format.read_manifest(folder)
    except DamagedError as error:
        return 0, [str(error)]
    lines = [
        line
        for number, record in enumerate(manifest.shards)
        for line in _problems(folder, number, record)
    ]
    return 1 + sum(2 + len(one.sizes) for one in manifest.shards), lines


def _problems(folder: Path, number: int, record: ShardRecord) -> Iterator[str]:
    """A line per missing or damaged file of a shard, with its first damaged block."""
    stem = format.shard_file(folder, number, "")
    names = Path(f"{stem}{format.SOURCES}")
    if not names.is_file():
        yield f"{names} is missing"
    elif xxhash.xxh3_128_hexdigest(names.read_bytes()) != record.sources:
        yield f"{names} is damaged"
    try:
        shard = Shard(stem, record.sizes, record.sums, remedy(stem))
    except (FileNotFoundError, DamagedError) as error:
        yield str(error)
        return
    for suffix, size in record.sizes.items():
        try:
            shard.read(suffix, 0, size)
        except (FileNotFoundError, DamagedError) as error:
            yield str(error)
