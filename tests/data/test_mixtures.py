"""Mixtures: which source gives a row, how they are written, and what a run does with them."""

import collections
import dataclasses
import io
import json
import re
import types
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared_parts import reading
from recipe_cases import Recipe
from rich.console import Console

from zoo import text
from zoo.data import mixed_text
from zoo.data.corpus import Corpus
from zoo.data.datasets import batch_shapes
from zoo.data.mixed_text import read_mixture
from zoo.data.mixtures import (
    MAX_PERIOD,
    MixtureDataset,
    Schedule,
    Stage,
    lay_out,
    rounded,
    shares_of,
)
from zoo.data.prepared import opening
from zoo.data.token_datasets import TOKEN_BATCH, BucketedDataset, PackedDataset
from zoo.data.tokenizer import BPETokenizer
from zoo.runs import monitor
from zoo.runs.metrics import read_metrics
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.tasks import language, mixtures
from zoo.tasks.mixtures import first_difference

SHARES = st.lists(
    st.one_of(st.integers(1, 3), st.integers(0, 300)), min_size=2, max_size=12
).filter(any)


@settings(max_examples=20, deadline=None)
@given(SHARES, st.integers(0, 2**40))
def test_each_source_is_within_one_of_its_weight_at_every_grain(shares, periods):
    order = lay_out(shares)
    counts = np.cumsum(order[:, None] == np.arange(len(shares)), axis=0)
    expected = np.arange(1, len(order) + 1)[:, None] * np.asarray(shares) / sum(shares)
    assert len(order) == sum(shares)
    assert np.abs(counts - expected).max() <= 1
    schedule = Schedule([Stage(0, tuple(shares))])
    begin = periods * sum(shares)
    assert schedule.counts(begin).tolist() == [periods * share for share in shares]
    assert schedule.locate(begin)[0] == order[0]


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(2, 6), st.integers(1, 5))
def test_stages_continue_each_sources_numbers_without_a_gap(data, sources, per_batch):
    some = st.lists(st.integers(0, 9), min_size=sources, max_size=sources).filter(any)
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, 40), max_size=3)))]
    stages = [Stage(start, tuple(data.draw(some))) for start in starts]
    schedule = Schedule(stages, per_batch)
    seen = collections.Counter()
    for grain in range(60 * per_batch):
        stage = max(i for i, one in enumerate(stages) if one.start * per_batch <= grain)
        if grain == stages[stage].start * per_batch:
            began, weights = dict(seen), np.asarray(stages[stage].shares)
        source, number = schedule.locate(grain)
        assert number == seen[source]
        seen[source] += 1
        within = np.array([seen[s] - began.get(s, 0) for s in range(sources)])
        length = grain + 1 - stages[stage].start * per_batch
        assert np.abs(within - length * weights / weights.sum()).max() <= 1
    assert schedule.counts(60).tolist() == [seen[s] for s in range(sources)]
    fresh = Schedule(stages, per_batch)
    grains = np.random.default_rng(0).permutation(60 * per_batch)[:20]
    assert [fresh.locate(int(g)) for g in grains] == [schedule.locate(int(g)) for g in grains]


def test_very_small_weights():
    shares = shares_of([Fraction("0.0001"), Fraction("0.9999")])
    assert shares == (1, 9999)
    order = lay_out(shares)
    assert np.count_nonzero(order == 0) == 1
    with pytest.raises(ValueError, match=r"repeat only after 1,000,000 rows.*fewer digits"):
        shares_of([Fraction("0.000001"), Fraction("0.999999")])
    temperature = rounded([1e-12, 1.0, 1.0])
    assert min(temperature) == 1
    assert sum(temperature) <= MAX_PERIOD


def test_the_grammar_of_the_flag():
    for files in ("a/*.txt,b/*.txt", "a/x=1/*.parquet", "s3://bucket/a=b/*.txt", "./a=b.txt", ""):
        assert not opening.is_mixture(files)
    written = (
        "code=src/**/*.py,more/*.py:0.7,help=s3://bucket/a:b/*.txt:.2,web=hf://x@v:1/y.txt:1e-1"
    )
    assert opening.is_mixture(written)
    mixture = mixed_text.parse(written)
    assert [(s.name, s.files, s.weight) for s in mixture.sources] == [
        ("code", "src/**/*.py,more/*.py", 0.7),
        ("help", "s3://bucket/a:b/*.txt", 0.2),
        ("web", "hf://x@v:1/y.txt", 0.1),
    ]
    assert mixture.resolve(10, [1, 1, 1]) == (Stage(0, (7, 2, 1)),)
    no_weight = mixed_text.parse("a=gs://bucket/*.txt,b=y.txt")
    assert no_weight.sources[0].files == "gs://bucket/*.txt"
    assert no_weight.resolve(10, [100, 100])[0].shares == (1, 1)
    for flag, message in {
        "a=x.txt:0,b=y.txt:0": "weights are all zero",
        "a=x.txt:1,a=y.txt:1": r"the source \['a'\] is there twice",
        "a=:1,b=y.txt:1": "sources.a.files=''",
        "a=x.txt:-1,b=y.txt:1": "weights.a=-1.0",
    }.items():
        with pytest.raises(ValueError, match=message):
            mixed_text.parse(flag)


TABLE = """
[sources.code]
files = "src/*.py"
weight = 0.7
max_epochs = 4
[sources.docs]
files = "docs/*.md"
weight = 0.3
[[stages]]
start = 40
weights = {code = 1, docs = 1}
[[stages]]
last = 10
weights = {docs = 1}
"""


def parse_table(tmp_path, table):
    path = tmp_path / "mixture.toml"
    path.write_text(table)
    assert opening.is_mixture(str(path))
    return mixed_text.parse(str(path))


def test_a_table_with_stages_and_temperature(tmp_path):
    mixture = parse_table(tmp_path, TABLE)
    stages = mixture.resolve(100, [5, 5])
    assert stages == (Stage(0, (7, 3)), Stage(40, (1, 1)), Stage(90, (0, 1)))
    assert mixture.sources[0].max_epochs == 4
    with pytest.raises(ValueError, match=r"stages\[1\] .* 40, .* 40"):
        mixture.resolve(50, [5, 5])
    hot = "temperature = 2\n" + re.sub("weight = .*", "", TABLE)
    shares = parse_table(tmp_path, hot).resolve(100, [10_000, 100])[0].shares
    assert shares[0] / shares[1] == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("weight = 0.7", "weight = -1"), "weights.code=-1.0"),
        (("weight = 0.7", "weight = nan"), "sources.code.weight=nan"),
        (("weight = 0.7", "weight = 'a'"), "sources.code.weight='a'"),
        (("weight = 0.7\n", ""), r"\['docs'\] have a weight"),
        (("max_epochs", "epochs"), r"no field sources.code.epochs \(known are"),
        (("{docs = 1}", "{help = 1}"), r"stages\[1\].weights .* \['help'\]"),
        (("{docs = 1}", "{docs = 0}"), r"stages\[1\].weights .* zero"),
        (("{docs = 1}", "{docs = 'a'}"), r"stages\[1\].weights.docs='a'"),
        (("{docs = 1}", "1"), "no table"),
        (("last = 10", "when = 10"), r"no field stages\[1\].when"),
        (("last = 10\n", ""), r"stages\[1\] needs either `start` or `last`"),
        (("last = 10", "last = 10\nstart = 50"), r"stages\[1\] needs either `start` or `last`"),
        (("sources.docs", "sources.average"), "'average' cannot be named so"),
        (("max_epochs = 4", "max_epochs = 0"), "sources.code.max_epochs=0.0"),
        (("[sources.code]", "temperature = 2\n[sources.code]"), "leave out either"),
        (("[sources.docs]", "[sources.code]"), "no table"),
    ],
)
def test_tables_that_are_refused(tmp_path, change, message):
    assert change[0] in TABLE
    with pytest.raises(ValueError, match=message):
        parse_table(tmp_path, TABLE.replace(*change))


STAGES = (Stage(0, (3, 1)), Stage(5, (1, 2)))


def make_dataset(rows="packed", stages=STAGES):
    datasets = {}
    for source, name in enumerate(("code", "docs")):
        lengths = np.random.default_rng(source).integers(3, 20, 17)
        first = 1 + 100 * source
        arrays = [np.arange(first, first + n, dtype=np.int32) for n in lengths]
        corpus = Corpus.from_arrays(arrays, 256, num_bytes=1000)
        datasets[name] = (
            PackedDataset(corpus, 0, 16, 8, 3)
            if rows == "packed"
            else BucketedDataset(corpus, 0, (16, 32), 8, 3)
        )
    return MixtureDataset(datasets, stages)


@pytest.mark.parametrize("rows", ["packed", "bucketed"])
def test_batches_are_functions_of_k_in_any_parts(rows):
    dataset = make_dataset(rows)
    taken = collections.Counter()
    for k in range(8):
        batch = dataset.batch(k)
        assert batch.keys() == {*TOKEN_BATCH, "source"}
        shapes = batch_shapes(dataset)[dataset.bucket(k)]
        assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {
            n: (x.shape, x.dtype) for n, x in shapes.items()
        }
        assert batch["tokens"].shape == (8, dataset.bucket(k))
        fresh = make_dataset(rows) if k % 4 == 3 else dataset  # after a kill
        pieces = [fresh.batch(k, part) for part in (slice(0, 2), slice(2, 8))]
        for name in batch:
            joined = np.concatenate([piece[name] for piece in pieces])
            np.testing.assert_array_equal(joined, batch[name])
        # The rows are those of the sources' own datasets, one after the other.
        for row in range(8):
            one, _ = dataset.schedule.locate(8 * k + row if rows == "packed" else k)
            name = list(dataset.datasets)[one]
            assert batch["source"][row] == one
            own, place = divmod(taken[name], 8)
            expected = dataset.datasets[name].batch(own)
            if rows == "packed":
                source = dataset.datasets[name]
                epoch, number = divmod(taken[name], source.num_rows)
                own, place = divmod(number, 8)
                expected = source.batch(epoch * source.batches_per_epoch + own)
            np.testing.assert_array_equal(batch["tokens"][row], expected["tokens"][place])
            assert (batch["tokens"][row].max() > 100) == (name == "docs") or not batch["weights"][
                row
            ].any()
            taken[name] += 1
    epochs = dataset.epochs(8)
    for name, count in taken.items():
        assert count > 8
        assert epochs[name] == count / dataset.datasets[name].num_rows


def write_sources(folder):
    for name, word in (("code", "def f(x): return x\n"), ("docs", "The text is plain. ")):
        (folder / name).mkdir(parents=True)
        for i in range(12):
            (folder / name / f"{i}.txt").write_text(f"{i} " + word * (10 + i))
    return f"code={folder}/code/*.txt:0.7,docs={folder}/docs/*.txt:0.3"


def load(tmp_path, files, steps=10, **options):
    config, tokenizer_folder = reading(tmp_path, files, {"tokenizer": "bytes"} | options)
    return read_mixture(config, steps=steps, seed=0, tokenizer_folder=tokenizer_folder)


def test_the_text_of_all_sources(tmp_path):
    data = load(tmp_path, write_sources(tmp_path), tokenizer="bpe", vocab_size=300)
    assert isinstance(data.tokenizer, BPETokenizer)
    assert "return" in data.tokenizer.decode(data.tokenizer.encode("return"))
    held_out = [source.held_out.corpus for source in data.sources.values()]
    assert data.held_out.corpus.num_bytes == sum(corpus.num_bytes for corpus in held_out)
    train_texts, held_out_texts = texts_of(data)
    assert min(len(train_texts), len(held_out_texts)) > 1
    assert not train_texts & held_out_texts
    for source in data.sources.values():
        dataset = source.held_out
        weights = [dataset.batch(k)["weights"].sum() for k in range(dataset.batches_per_epoch)]
        assert dataset.corpus.num_positions == sum(weights) > 0
    assert 0 < data.compressors["xz -9"] < 8


def texts_of(data):
    """The texts to train on and those held out, of all sources."""
    found = set[str](), set[str]()
    for source in data.sources.values():
        for texts, dataset in zip(found, (source.train, source.held_out), strict=True):
            corpus = dataset.corpus
            texts |= {data.tokenizer.decode(corpus[i]) for i in range(len(corpus))}
    return found


def write_texts(folder, texts):
    folder.mkdir(parents=True)
    for i, one in enumerate(texts):
        (folder / f"{i}.txt").write_text(one)
    return f"{folder}/*.txt"


def test_no_source_trains_on_what_another_holds_out(tmp_path, caplog):
    some = [f"document {i} of some" for i in range(60)]
    whole, again = write_texts(tmp_path / "a", some), write_texts(tmp_path / "b" / "c", some[::-1])
    for number, files in enumerate(
        (
            f"one={tmp_path}/a/*.txt,two={tmp_path}/[ab]/**/*.txt",  # other names for the files
            f"one={whole},two={again}",  # copies
            f"one={whole},few={write_texts(tmp_path / 'few', some[:2])}",  # one has to change parts
            f"one={whole},single={write_texts(tmp_path / 'single', some[5:6])}",  # in two parts
        )
    ):
        (tmp_path / str(number)).mkdir()
        data = load(tmp_path / str(number), files, held_out=0.1)
        train, held_out = texts_of(data)
        assert len(train) > 40
        assert len(held_out) > 4
        assert not train & held_out
        assert number != 3 or some[5] not in train
        said = "1 documents to train on of the source 'one' are left out"
        assert (said in caplog.text) == (number > 1)
        caplog.clear()
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"'one' .* document"):
        load(tmp_path / "none", f"one={tmp_path}/few/0.txt,two={tmp_path}/few/0.txt")


def test_the_first_step_that_differs():
    def record(*stages):
        return {"sources": ["a", "b"], "stages": [{"start": s, "shares": w} for s, w in stages]}

    old = record((0, [1, 1]), (30, [1, 2]))
    assert first_difference(old, record((0, [1, 1]), (30, [1, 2]))) is None
    assert first_difference(old, record((0, [1, 1]), (30, [1, 3]))) == 30
    assert first_difference(old, record((0, [1, 1]), (20, [1, 2]))) == 20
    assert first_difference(old, record((0, [1, 1]))) == 30
    assert first_difference(old, record((0, [1, 1]), (30, [1, 2]), (40, [1, 1]))) == 40
    assert first_difference(old, record((0, [2, 1]), (30, [1, 2]))) == 0


def test_a_change_behind_a_run_is_refused_and_one_before_it_recorded(tmp_path):
    data = load(tmp_path, write_sources(tmp_path))
    said = []
    config = text.Config(files="mixture.toml")
    run = Run(language.Config(run_dir=tmp_path / "run", steps=40, data=config))
    run.say = said.append
    run.checkpointer = types.SimpleNamespace(good_steps=lambda: [20])

    def record(*stages):
        dataset = MixtureDataset(data.train.datasets, [Stage(0, (7, 3)), *stages])
        mixtures.record(run, dataclasses.replace(data, train=dataset))
        return json.loads((run.folder / "mixture.json").read_text())

    with pytest.raises(RunError, match=r"mixture\.json is missing .* has 20 steps"):
        record(Stage(10, (1, 1)))
    run.checkpointer.good_steps = list
    assert record(Stage(10, (1, 1)))["changes"] == []
    run.checkpointer.good_steps = lambda: [20]
    assert record(Stage(10, (1, 1)))["changes"] == said == []
    before = (run.folder / "mixture.json").read_bytes()
    with pytest.raises(
        RunError, match=r"differ from step 10 on .*0\.5, 'docs': 0\.5.*from step 20"
    ):
        record(Stage(10, (1, 2)))
    with pytest.raises(RunError, match="differ from step 10 on"):
        record()
    assert (run.folder / "mixture.json").read_bytes() == before
    found = record(Stage(10, (1, 1)), Stage(20, (1, 9)))
    assert found["changes"] == [
        {"step": 20, "from": 20, "stages_before": json.loads(before)["stages"]}
    ]
    assert "change from step 20 on" in said[0]
    again = record(Stage(10, (1, 1)), Stage(20, (1, 9)))
    assert again == found


def test_finetuning_says_that_it_takes_no_mixture():
    with pytest.raises(ValueError, match="is a mixture of sources, which only"):
        opening.open_text(text.Config(files="a=x.txt:1,b=y.txt:2"), text.Config(), "bytes")


def test_the_progress_line_has_epochs_per_source():
    stream = io.StringIO()
    bar = monitor.ProgressBar(2, console=Console(file=stream, width=200))
    bar.update(1, **{"code/epoch": 0.25, "docs/epoch": 1.5, "code/loss": 2.0, "docs/loss": 3.125})
    assert "losses code 2.0000, docs 3.1250  epochs code 0.25, docs 1.50" in stream.getvalue()


@pytest.fixture
def train(tmp_path, no_curves, cache_put_back):
    """`train(name, *flags)` runs the recipe in this process."""
    return lambda name, *flags: Recipe("lm", tmp_path).run_here(tmp_path / name, *flags)


@pytest.mark.slow
def test_a_run_resumes_across_a_stage_that_was_added(train, tmp_path, capsys):
    """The stage at 6 is added once 4 steps are done; the whole run has it from the beginning."""
    files = write_sources(tmp_path)
    code, docs = (part.partition("=")[2].rpartition(":")[0] for part in files.split(","))
    table = (
        f'[sources.code]\nfiles="{code}"\nweight=0.7\n[sources.docs]\nfiles="{docs}"\nweight=0.3\n'
    )
    staged = table + "[[stages]]\nstart=6\nweights={code=1,docs=4}\n"
    path = tmp_path / "mixture.toml"
    path.write_text(staged)
    flags = [f"--data={path}", "--steps=10", "--mesh=fsdp=2"]
    flags += ["--data.batch-size=8", "--data.seq-len=32"]
    train("whole", *flags)
    path.write_text(table)
    train("parts", *flags, "--steps=4")
    path.write_text(staged)
    capsys.readouterr()
    train("parts", *flags)
    assert "the weights of the sources change from step 6 on" in capsys.readouterr().out
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    epochs = [
        [{n: x for n, x in line.items() if n.endswith("/epoch")} for line in lines]
        for lines in (whole, parts)
    ]
    assert [e for e in epochs[0] if e] == [e for e in epochs[1] if e] != []
    # Schedules of 4 and of 10 steps differ, and so do later losses; the first are before any step.
    trained = [[line for line in lines if "loss" in line] for lines in (whole, parts)]
    for name in ("code/loss", "docs/loss"):
        assert trained[0][0][name] == trained[1][0][name]
        assert all(line[name] > 0 for lines in trained for line in lines)
    last = [next(x for x in reversed(lines) if "code/eval_loss" in x) for lines in (whole, parts)]
    assert last[0].keys() == last[1].keys() > {"docs/eval_loss", "docs/bits_per_byte"}
