"""The preparation of a corpus: its content, its files, kills and workers, and what is refused."""

import dataclasses
import hashlib
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from helpers import contents
from test_splits import web  # noqa: F401

from zoo import text as zoo_text
from zoo.__main__ import main
from zoo.common import store
from zoo.common.store import location
from zoo.data.prepared import command, copies, engines, hashes, prepare, tokenizing
from zoo.data.prepared.format import RECORD, DamagedError, Manifest, read_manifest
from zoo.data.prepared.opening import open_prepared
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "é", "\u2028"]


def write_corpus(folder: Path, files: int = 3, lines: int = 60, words: int = 4) -> list[list[str]]:
    """Write files of JSON lines with copies and empty documents among them; return their texts."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    texts = [
        [" ".join(rng.choices(WORDS, k=rng.randint(0, words))) for _ in range(lines)]
        for _ in range(files)
    ]
    for number, content in enumerate(texts):
        path = folder / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in content))
    return texts


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A small corpus."""
    write_corpus(tmp_path / "text")
    return str(tmp_path / "text" / "*.jsonl")


def shard(folder: Path, number: int, suffix: str) -> Path:
    return folder / "shards" / f"{number:08}{suffix}"


SMALL = {"shard_megabytes": 0.0007, "workers": 1}


def documents_of(folder: Path, manifest: Manifest, part: str) -> list[tuple[str, str]]:
    """(name, text) of the documents of a part, as the format's description has it."""
    tokenizer, found = load_tokenizer(folder / "tokenizer"), []
    for number, record in enumerate(manifest.shards):
        tokens = np.fromfile(shard(folder, number, ".tokens"), manifest.dtype)
        rows = np.fromfile(shard(folder, number, f".{part}"), RECORD)
        names = json.loads(shard(folder, number, ".sources.json").read_text())
        assert len(tokens) * tokens.itemsize == record.tokens_bytes
        texts = [tokenizer.decode(tokens[int(r["start"]) :][: int(r["length"])]) for r in rows]
        found += [
            (f"{names[r['source']]}:{r['record']}", t) for r, t in zip(rows, texts, strict=True)
        ]
        hashed = [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
        assert [row["hash"].tobytes() for row in rows] == hashed == sorted(hashed)
        positions = np.cumsum(rows["length"].astype(int) + manifest.frame - 1)
        np.testing.assert_array_equal(rows["end"], positions)
        total = sum(rows["length"])
        counts = (len(rows), total, total, positions[-1] if len(rows) else 0)
        size = sum(len(text.encode()) for text in texts)
        assert dataclasses.astuple(getattr(record, part)) == (*counts, size)
    return found


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "path"])
def test_every_document_is_in_one_part_once(tmp_path: Path, tokenizer: str):
    texts = write_corpus(tmp_path / "text")
    if tokenizer == "path":
        tokenizer = str(tmp_path / "tokenizer")
        ByteTokenizer().save(tmp_path / "tokenizer")
    manifest = prepare.prepare(
        str(tmp_path / "text" / "*.jsonl"),
        tmp_path / "out",
        tokenizer=tokenizer,
        vocab_size=280,
        held_out=0.2,
        **SMALL,
    )
    first: dict[str, str] = {}
    for number, lines in enumerate(texts):
        for line, text in enumerate(lines, start=1):
            first.setdefault(text, f"{number}.jsonl:{line}")
    empty = sum(text == "" for lines in texts for text in lines)
    copies = sum(map(len, texts)) - empty - (len(first) - 1)
    assert min(empty, copies) > 5
    assert len(manifest.shards) > 4
    counted = (manifest.empty, manifest.first_empty, manifest.duplicates)
    assert counted == (empty, first.pop(""), copies)
    unit = {
        text: int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big") / 2**128
        for text in first
    }
    for part, wanted in (("held_out", True), ("train", False)):
        found = documents_of(tmp_path / "out", manifest, part)
        # A piece of a file counts its lines from its first byte, which its name has.
        names = {text: re.sub(r"\+\d+:\d+", "", name) for name, text in found}
        expected = {text: name for text, name in first.items() if (unit[text] < 0.2) == wanted}
        assert len(found) == len(expected) > 10
        assert set(names) == set(expected)
        for text, name in names.items():
            assert name == expected[text] or name == expected[text].partition(":")[0]
    assert read_manifest(tmp_path / "out") == manifest
    named = tokenizer if tokenizer in ("bytes", "bpe") else manifest.tokenizer
    assert manifest.options["tokenizer"] == named
    assert not (tmp_path / "out" / "work").exists()


def test_slices_workers_and_runs_do_not_change_a_byte(tmp_path: Path, data: str, monkeypatch):
    prepare.prepare(data, tmp_path / "one", **SMALL)
    prepare.prepare(data, tmp_path / "two", **{**SMALL, "workers": 2})
    monkeypatch.setattr(hashes, "SLICE", 8)
    monkeypatch.setattr(tokenizing, "BATCH", 300)
    prepare.prepare(data, tmp_path / "sliced", **SMALL)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "sliced")
    monkeypatch.undo()
    runs = [np.zeros(3, hashes.RAW), np.zeros(2, hashes.RAW)]
    runs[0]["high"], runs[1]["high"] = [1, 5, 2**63], [0, 5]
    runs[1]["start"] = 1
    merged = np.concatenate([*hashes.merged(runs)])
    assert merged["high"].tolist() == [0, 1, 5, 2**63]
    assert merged["start"].tolist() == [1, 0, 0, 0]


def test_workers_import_neither_the_program_nor_jax(tmp_path: Path, monkeypatch):
    program = types.ModuleType("__main__")
    program.__file__ = str(tmp_path / "program.py")  # a program without a guard
    Path(program.__file__).write_text("import jax")
    monkeypatch.setitem(sys.modules, "__main__", program)
    expression = "[__import__('zoo.data.prepared.tokenizing'), 'jax' in __import__('sys').modules]"
    found = [*engines.run_processes(eval, [(expression + "[1]",)] * 2, 2)]
    assert found == [False, False]
    assert "jax" in sys.modules


def test_finished_shards_are_not_done_again(tmp_path: Path, data: str):
    bad = tmp_path / "text" / "2.jsonl"
    good = bad.read_bytes()
    bad.write_bytes(good[:-4] + b"\xff" + good[-3:])
    with pytest.raises(ValueError, match=r"2\.jsonl.*not UTF-8"):
        prepare.prepare(data, tmp_path / "out", **SMALL)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.tokens")}
    assert len(done) > 3
    torn = shard(tmp_path / "out", 1, ".tokens")
    torn.write_bytes(torn.read_bytes()[:-2])  # as a record without its shard
    bad.write_bytes(good)
    changed = tmp_path / "text" / "1.jsonl"  # a file of finished shards
    changed.write_bytes(changed.read_bytes().replace(b"alpha", b"omega"))
    prepare.prepare(data, tmp_path / "out", **SMALL)
    again = {path for path, then in done.items() if path.stat().st_mtime_ns != then}
    names = {path: json.loads(path.with_suffix(".sources.json").read_text()) for path in done}
    of_changed = {path for path in done if re.search(r"[12]\.jsonl", str(names[path]))}
    assert again == {torn, *of_changed}
    assert 2 < len(again) < len(done) - 1
    prepare.prepare(data, tmp_path / "fresh", **SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    bad.unlink()  # a prepared corpus needs its options alone
    with pytest.raises(ValueError, match="files is 3 there and 2 here"):
        prepare.prepare(data, tmp_path / "out", **SMALL)


def test_changed_files_are_not_the_same_corpus(tmp_path: Path, data: str):
    large = tmp_path / "text" / "large.jsonl"
    lines = "".join(json.dumps({"text": f"line {i} {'word ' * 4000}"}) + "\n" for i in range(60))
    large.write_text(lines)
    out = tmp_path / "out"
    made = prepare.prepare(data, out, workers=1)
    small = tmp_path / "text" / "1.jsonl"
    small.touch()
    assert prepare.prepare(data, out, workers=1) == made  # its content is the same
    refused = pytest.raises(ValueError, match=r"holds a corpus of other files: .* changed since")
    before = small.read_bytes()
    small.write_bytes(before.replace(b"alpha", b"omega"))
    with refused:
        prepare.prepare(data, out, workers=1)
    small.write_bytes(before)
    assert prepare.prepare(data, out, workers=1) == made
    assert large.stat().st_size > 2**20
    large.write_text(lines[:-10] + lines[-10:].replace("word", "wood"))
    with refused:
        prepare.prepare(data, out, workers=1)
    again = prepare.prepare(data, tmp_path / "again", workers=1)
    assert again.fingerprint != made.fingerprint
    large.write_text(lines)
    third = prepare.prepare(data, tmp_path / "third", workers=1)
    assert third.fingerprint == made.fingerprint  # whatever the times of the files


@pytest.mark.parametrize("stage", ["find_duplicates", "write_parts"])
def test_files_that_change_between_kills_are_read_again(
    tmp_path: Path, data: str, monkeypatch, stage: str
):
    out = tmp_path / "out"
    options = {"tokenizer": "bpe", "vocab_size": 280, **SMALL}
    run = prepare.run_all

    def killed(function, tasks, **rest):
        yield from run(function, tasks, **rest)
        if function.__name__ == stage:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "run_all", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(data, out, **options)
    monkeypatch.undo()
    for path in (tmp_path / "text").iterdir():
        path.write_bytes(path.read_bytes().replace(b"alpha", b"omega"))
    prepare.prepare(data, out, **options)
    prepare.prepare(data, tmp_path / "fresh", **options)
    assert contents(out) == contents(tmp_path / "fresh")


def test_another_configuration_is_refused(tmp_path: Path, data: str):
    prepare.prepare(data, tmp_path / "out", **SMALL)
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=r"held_out is 0.05 .* 0.1 here"):
        prepare.prepare(data, tmp_path / "out", held_out=0.1, **SMALL)
    with pytest.raises(ValueError, match=r"tokenizer is 'bytes' .* 'bpe' here; vocab_size"):
        prepare.prepare(data, tmp_path / "out", tokenizer="bpe", **SMALL)
    with pytest.raises(ValueError, match=r"\(0.jsonl, 1.jsonl, 2.jsonl\)"):
        prepare.prepare(data, tmp_path / "text", **SMALL)
    foreign = tmp_path / "foreign" / "work"
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"foreign' holds something else \(work\)"):
        prepare.prepare(data, tmp_path / "foreign", **SMALL)
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        prepare.prepare(data, tmp_path / "none", tokenizer=str(tmp_path / "missing"), **SMALL)
    assert not (tmp_path / "none").exists()
    for wrong in ({"held_out": 1.0}, {"workers": 0}, {"shard_megabytes": 0.0}):
        [(name, value)] = wrong.items()
        with pytest.raises(ValueError, match=f"{name}={value}"):
            prepare.prepare(data, tmp_path / "out", **{**SMALL, **wrong})
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(DamagedError, match=r"not the tokenizer .* manifest"):
        prepare.prepare(data, tmp_path / "out", **SMALL)
    edited = before["manifest.json"].replace(b'"duplicates": ', b'"duplicates": 1')
    (tmp_path / "out" / "manifest.json").write_bytes(edited)
    with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json"):
        read_manifest(tmp_path / "text")


def test_neither_part_is_empty(tmp_path: Path):
    file = tmp_path / "few.jsonl"
    for held_out, expected in ((1e-9, [1, 2]), (1 - 1e-9, [2, 1])):
        file.write_text("".join(f'{{"text": "{text}"}}\n' for text in "abbc"))
        manifest = prepare.prepare(
            str(file), tmp_path / str(held_out), held_out=held_out, workers=1
        )
        assert [manifest.total(p).documents for p in ("held_out", "train")] == expected
    file.write_text('{"text": "a"}\n' * 3)
    with pytest.raises(ValueError, match="1 characters:"):
        prepare.prepare(str(file), tmp_path / "one", workers=1)


def test_a_second_process_waits(tmp_path: Path, caplog):
    write_corpus(tmp_path / "text")
    (tmp_path / "out").mkdir()
    made = []
    with caplog.at_level(logging.WARNING), prepare._locked(tmp_path / "out"):
        arguments = (str(tmp_path / "text" / "*.jsonl"), tmp_path / "out")
        thread = threading.Thread(target=lambda: made.append(prepare.prepare(*arguments)))
        thread.start()
        while "waiting for it" not in caplog.text:
            assert thread.is_alive()
            time.sleep(0.01)
        assert not made
        assert not list((tmp_path / "out").iterdir())
    thread.join()
    assert made[0].fingerprint == read_manifest(tmp_path / "out").fingerprint


def test_the_command_sums_up_and_verify_names_a_damaged_block(tmp_path: Path, capsys):
    write_corpus(tmp_path / "text", files=2, lines=400, words=60)
    out = tmp_path / "out"
    main(["prepare", str(tmp_path / "text" / "*.jsonl"), "--out", str(out), "--workers", "1"])
    printed = capsys.readouterr().out
    assert "1 shards from 2 files" in printed
    assert "exact copies" in printed
    assert f"python -m recipes.lm --data {out}" in printed
    assert re.search(r"documents without a token, the first of them \d.jsonl:\d+", printed)
    main(["verify", str(out)])
    assert "6 files are as they were written" in capsys.readouterr().out
    cases = {
        ".tokens": ("block 1 (bytes 65,536 to 131,071)", 2**16),
        ".train": ("block 0 (bytes 0 to ", 49),
        ".held_out": ("block 0 (bytes 0 to ", 3),
        ".sums": ("is not what was written", 8),
        ".sources.json": ("is damaged", 3),
    }
    for suffix, (message, position) in cases.items():
        path = shard(out, 0, suffix)
        good = path.read_bytes()
        changed = good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]
        for content_now, message_now in ((changed, message), (good[:-1], ""), (None, "missing")):
            path.unlink() if content_now is None else path.write_bytes(content_now)
            [line] = command.verify(out)[1]
            assert line.startswith(str(path))
            assert message_now in line
        path.write_bytes(good)
    assert command.verify(out) == (6, [])
    shard(out, 0, ".train").unlink()
    with pytest.raises(Exception, match="damaged"):
        main(["verify", str(out)])


COMMAND = [sys.executable, "-m", "zoo", "prepare"]


def ends(group: int) -> bool:
    """Whether the processes of a group end within ten seconds."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_killed_at_random_it_resumes_to_the_same_bytes(tmp_path: Path):
    write_corpus(tmp_path / "text", files=4, lines=3000, words=40)
    data, options = str(tmp_path / "text" / "*.jsonl"), ["--shard-megabytes", "0.02"]
    program = "from zoo.data.prepared.prepare import prepare\n"
    program += f"prepare({data!r}, {str(tmp_path / 'out')!r}, tokenizer='bpe', vocab_size=400, "
    program += "shard_megabytes=0.02, workers=2)"
    rng, kills, resumed = random.Random(1), 0, 0
    for attempt in range(30):
        process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        try:
            process.wait(timeout=rng.uniform(0.5, 1.6) * 1.1**attempt)  # a busy machine is slow
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            assert ends(process.pid)  # its workers, by themselves
            resumed += bool(list((tmp_path / "out").rglob("*.tokens")))
        else:
            assert process.returncode == 0
            break
    assert kills >= 2
    assert resumed >= 1
    if process.returncode:
        subprocess.run([sys.executable, "-c", program], check=True)
    fresh = [*COMMAND, data, "--out", str(tmp_path / "fresh"), "--tokenizer", "bpe"]
    subprocess.run([*fresh, "--vocab-size", "400", "--workers", "1", *options], check=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.slow
def test_a_killed_worker_is_a_sentence(tmp_path: Path):
    with pytest.raises(ChildProcessError, match="a worker was killed"):
        list(engines.run_processes(os.abort, [(), ()], 2))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path):
    peaks = []
    for size in (4, 32):
        (file := tmp_path / f"{size}.jsonl").write_text("")
        rng = random.Random(size)
        with open(file, "w") as out:
            for _ in range(size * 5000):
                out.write(json.dumps({"text": f"{rng.random()} " + "some words " * 16}) + "\n")
        program = "from zoo.data.prepared.prepare import prepare\n"
        # One split, so that a whole file, as a compressed one is, goes through one shard.
        program += f"prepare({str(file)!r}, {str(tmp_path / f'out{size}')!r}, workers=1, "
        program += "shard_megabytes=1000.0)\nprint(open('/proc/self/status').read())"
        done = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        )
        peaks.append(int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) / 1024)
    # Mapped files count while their pages are in memory: the ids of the larger are 62 MB.
    assert peaks[1] < min(peaks[0] + 125, 1000), peaks


@pytest.mark.slow
def test_ray_gives_the_same_bytes(tmp_path: Path, data: str):
    pytest.importorskip("ray")
    prepare.prepare(data, tmp_path / "one", **SMALL)
    prepare.prepare(data, tmp_path / "ray", **SMALL, engine="ray")
    assert contents(tmp_path / "one") == contents(tmp_path / "ray")
    with pytest.raises(ValueError, match="'x'") as error:
        prepare.prepare(data, tmp_path / "x", **SMALL, field="x", engine="ray")
    assert type(error.value) is ValueError  # not one of Ray's, with a traceback as its text


def test_an_address_gets_the_same_files(tmp_path: Path, data: str, monkeypatch):
    monkeypatch.setattr(copies, "CACHE", tmp_path / "cache")
    address = location(f"memory://{tmp_path.name}/out", "out")
    put, calls, written = store.Store.put, [], []

    def fail_once(self, folder: Path, names, prefix: str = "") -> list[str]:
        calls.append(prefix)
        if len(calls) == 3:
            raise ConnectionError("the line was cut")
        written.extend(prefix + name for name in names)
        return put(self, folder, names, prefix)

    monkeypatch.setattr(store.Store, "put", fail_once)
    with pytest.raises(ConnectionError):
        prepare.prepare(data, str(address), **SMALL)
    assert not (address / "manifest.json").exists()
    prepare.prepare(data, str(address), **SMALL)
    names = [name for name in written if name.startswith("shards/00000000")]
    assert len(names) == len(set(names)) == 5  # a whole shard is not copied again
    prepare.prepare(data, tmp_path / "out", **SMALL)
    for name, wanted in contents(tmp_path / "out").items():
        assert (address / name).read_bytes() == wanted
    assert not list((tmp_path / "cache").iterdir())
    assert prepare.prepare(data, str(address), **SMALL) == read_manifest(tmp_path / "out")
    with pytest.raises(ValueError, match=r"field is 'text' .* 'x' here"):
        prepare.prepare(data, str(address), field="x", **SMALL)
    (address / "manifest.json").unlink()  # as another machine leaves it that was killed
    assert prepare.prepare(data, str(address), **SMALL) == read_manifest(address)
    (address.parent / "other" / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"holds something else \(a\.txt\)"):
        prepare.prepare(data, str(address.parent / "other"), **SMALL)


def test_each_byte_of_an_address_is_read_once(tmp_path: Path, web):  # noqa: F811
    address, folder, sent = web
    write_corpus(folder, lines=400)
    sizes = [(folder / f"{number}.jsonl").stat().st_size for number in range(3)]
    files = [f"{address}/{number}.jsonl" for number in range(3)]
    prepare.prepare(files, tmp_path / "out", workers=1)
    assert sent == [sizes[0], *sizes]  # the first block once more: are there two documents?


def test_names_of_special_tokens_are_read_as_told(tmp_path, capsys):
    inner = BPETokenizer.train(["some text"], 260)
    inner.tokenizer.add_special_tokens(["<|im_end|>"])
    inner.save(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"text {i}<|im_end|>"}) + "\n" for i in range(9))
    )
    data, end = str(tmp_path / "a.jsonl"), 260
    for name, more, says in (
        ("text", [], "the text has 9 names of special tokens, read as plain characters"),
        ("parse", ["--special-tokens", "parse"], "9 special tokens parsed"),
    ):
        flags = ["--tokenizer", str(tmp_path / "tokenizer"), "--workers", "1", *more]
        main(["prepare", data, "--out", str(tmp_path / name), *flags])
        assert says in capsys.readouterr().out
        prepared = open_prepared(tmp_path / name)
        ids = prepared.train.ids(0, 0, 100)
        assert (ids == end).any() == (name == "parse")
        read = zoo_text.Config(files=str(tmp_path / name), cache=None)
        run_folder = tmp_path / f"run-{name}"
        options = {"seed": 0, "tokenizer_folder": lambda make, to=run_folder: [make(to), to][1]}
        assert says in zoo_text.read_text(read, **options).special_tokens
        other = dataclasses.replace(read, special_tokens={"text": "parse", "parse": "text"}[name])
        with pytest.raises(ValueError, match=r"data.special_tokens=.*"):
            zoo_text.read_text(other, **options)
    with pytest.raises(ValueError, match=r"special_tokens .* 'parse' here"):
        prepare.prepare(
            data, tmp_path / "text", tokenizer=str(tmp_path / "tokenizer"), special_tokens="parse"
        )


def test_long_documents_are_tokenized_in_pieces(monkeypatch):
    monkeypatch.setattr(tokenizing, "CONTEXT", 10)
    text = "".join(f"line {i} of a long text ü\n" for i in range(40)) + "no break" * 30
    tokenizer, lengths = ByteTokenizer(), []
    encode = tokenizer.encode
    tokenizer.encode = lambda piece: lengths.append(len(piece)) or encode(piece)
    [short, ids] = tokenizing.encode(tokenizer, ["short", text], longest=100)
    assert tokenizer.decode(short) == "short"
    assert ids.tolist() == encode(text).tolist()
    assert max(lengths) <= 120


@pytest.mark.parametrize("letter", [" ", "\n", "N"])
def test_pieces_of_a_long_run_lose_and_repeat_nothing(letter, monkeypatch):
    monkeypatch.setattr(tokenizing, "CONTEXT", 50)
    tokenizer = BPETokenizer.train(["a" + letter * n + "b" for n in range(40)], 300)
    text = "ab" + letter * 1000 + "b"
    for longest in (201, 202, 203):
        [ids] = tokenizing.encode(tokenizer, [text], longest=longest)
        assert tokenizer.decode(ids) == text
        assert len(ids) < 200  # as runs are tokens
