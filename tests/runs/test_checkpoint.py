import contextlib
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xla
from helpers import bytes_read
from jax.sharding import NamedSharding, PartitionSpec
from model_folders import flip_bit
from stores import free_port

from zoo.common import checksums, files
from zoo.runs import checkpoint, stored_arrays
from zoo.runs.checkpoint import Checkpointer, CheckpointError, problems
from zoo.sharding import make_mesh


class State(eqx.Module):
    weights: dict[str, jax.Array]
    moments: tuple[jax.Array, ...]
    step: jax.Array
    key: jax.Array
    activation: Callable = jax.nn.gelu
    name: str = eqx.field(static=True, default="state")


def make_state(seed: int, mesh=None, size: int = 8) -> State:
    key = jax.random.key(seed)
    state = State(
        weights={"w": jax.random.normal(key, (size, 4)), "b": jnp.full(4, jnp.float32(seed))},
        moments=(jax.random.normal(key, (size, 4)).astype(jnp.bfloat16), jnp.arange(size) + seed),
        step=jnp.int32(seed),
        key=jax.random.split(key, 2),
    )
    if mesh is None:
        return state
    put = lambda leaf, where: jax.device_put(leaf, where) if eqx.is_array(leaf) else leaf
    return jax.tree.map(put, state, placement(state, mesh))


def placement(state, mesh):
    def place(leaf):
        axes = ("fsdp", "tensor")[: leaf.ndim] if leaf.ndim == 2 else ()
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(lambda leaf: place(leaf) if eqx.is_array(leaf) else leaf, state)


def skeleton(state, mesh):
    def abstract(leaf, where):
        if not eqx.is_array(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree.map(abstract, state, placement(state, mesh))


def host(tree) -> list[tuple[str, tuple, bytes]]:
    def data(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        # A copy: while NumPy looks at a buffer, JAX does not donate it.
        return np.asarray(jnp.copy(jax.random.key_data(leaf) if is_key else leaf))

    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return [(str(leaf.dtype), leaf.shape, data(leaf).tobytes()) for leaf in leaves]


@pytest.fixture
def opened(tmp_path):
    made = []

    def open_(folder=tmp_path / "checkpoints", **options) -> Checkpointer:
        made.append(Checkpointer(folder, **options))
        return made[-1]

    yield open_
    for checkpointer in made:
        checkpointer.close()


@pytest.mark.parametrize("spec", ["data=2,fsdp=2,tensor=2", ""])
def test_restores_bit_for_bit_on_any_mesh(opened, spec):
    state = make_state(3, make_mesh("data=4,fsdp=2"))
    meta = {"config": {"lr": 1e-3, "name": "x"}, "position": 12}
    writer = opened()
    writer.save(3, state, meta)
    writer.wait()
    checkpointer = opened()
    mesh = make_mesh(spec)
    for like in (skeleton(state, mesh), make_state(0, mesh)):
        restored, step, saved_meta = checkpointer.restore(like)
        assert (step, saved_meta) == (3, meta)
        assert host(restored) == host(state)
        assert restored.activation is jax.nn.gelu
        wanted = placement(state, mesh)
        for leaf, where in zip(
            jax.tree.leaves(eqx.filter(restored, eqx.is_array)),
            [s for s in jax.tree.leaves(wanted) if isinstance(s, NamedSharding)],
            strict=True,
        ):
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
    draw = lambda keys: jax.random.key_data(jax.vmap(jax.random.split)(keys))
    np.testing.assert_array_equal(draw(restored.key), draw(make_state(3).key))


def test_empty_restore_and_invalid_keep(opened, tmp_path):
    assert opened().restore(make_state(0)) is None
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)


def test_retention_keeps_the_newest(opened):
    checkpointer = opened(keep=2)
    for step in (1, 2, 10, 11):
        checkpointer.save(step, make_state(step), {})
    checkpointer.wait()
    assert checkpointer.good_steps() == [10, 11]
    assert sorted(path.name for path in checkpointer.folder.iterdir()) == ["10", "11"]


def test_pruning_waits_for_a_sealed_step(opened, monkeypatch):
    checkpointer = opened(keep=1)
    checkpointer.save(1, make_state(1), {})
    checkpointer.wait()

    def fail(folder, **_):
        assert checkpointer.good_steps() == [1]
        raise OSError("no space left")

    monkeypatch.setattr(checksums, "write", fail)
    checkpointer.save(2, make_state(2), {})
    with pytest.raises(CheckpointError, match="no space left"):
        checkpointer.wait()
    assert checkpointer.restore(make_state(0))[1] == 1
    monkeypatch.undo()
    checkpointer.save(2, make_state(2), {})
    checkpointer.wait()
    assert checkpointer.good_steps() == [2]


FULL = os.strerror(errno.ENOSPC)
FULL_DISK = {
    "ours": OSError(errno.ENOSPC, FULL),
    "TensorStore's": ValueError(f"RESOURCE_EXHAUSTED: Failed to write 8 bytes to file 18: {FULL}"),
}


@pytest.mark.parametrize(
    ("method", "error"), [("mkdir", "ours"), ("write", "TensorStore's"), ("seal", "ours")]
)
def test_full_disk_error_names_remaining_step(opened, monkeypatch, method, error):
    checkpointer = opened()
    owner = {"mkdir": Path, "write": stored_arrays, "seal": checkpoint}[method]

    def save(step):
        checkpointer.save(step, make_state(step), {})
        checkpointer.wait()

    def fail(*_, **__):
        raise FULL_DISK[error]

    for step, left in ((1, "no step is there"), (2, "step 1 is there")):
        for _ in range(2):  # what failed once is tried again, and may fail again
            with monkeypatch.context() as patched:
                patched.setattr(owner, method, fail)
                message = rf"Step {step} could not be saved in .*: the disk is full\. .*{left}"
                with pytest.raises(CheckpointError, match=message):
                    save(step)
        save(step)
    assert checkpointer.good_steps() == [1, 2]
    assert host(checkpointer.restore(make_state(0))[0]) == host(make_state(2))


@pytest.mark.parametrize("failing", [False, True])
def test_close_ends_the_threads(tmp_path, monkeypatch, failing):
    def fail(folder, **_):
        raise OSError("Input/output error")

    before = set(threading.enumerate())
    checkpointer = Checkpointer(tmp_path)
    if failing:
        monkeypatch.setattr(checksums, "write", fail)
    checkpointer.save(1, make_state(1), {})
    assert set(threading.enumerate()) - before
    expected = pytest.raises(CheckpointError, match="Input/output error")
    with expected if failing else contextlib.nullcontext():
        checkpointer.close()
    assert not set(threading.enumerate()) - before


def test_existing_steps_are_never_overwritten(opened):
    checkpointer = opened()
    for _ in range(2):
        checkpointer.save(1, make_state(1), {})
    checkpointer.wait()
    with pytest.raises(CheckpointError, match="Restore from this folder"):
        opened().save(1, make_state(2), {})
    assert host(checkpointer.restore(make_state(0))[0]) == host(make_state(1))


def test_meta_must_be_json(opened):
    with pytest.raises(TypeError, match="JSON"):
        opened().save(1, make_state(1), {"config": object()})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [truncate, flip_bit, Path.unlink, become_a_folder]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    checkpointer = Checkpointer(folder)
    for step in (1, 2):
        checkpointer.save(step, make_state(step), {})
    checkpointer.close()
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    """A copy of both steps."""
    return Path(shutil.copytree(two_steps, tmp_path / "copy"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_steps_fall_back_with_warning(folder, two_steps, caplog, opened, damage):
    names = [p.relative_to(two_steps) for p in two_steps.glob("2/**/*") if p.is_file()]
    # TensorStore writes the arrays to one file of data or to several, as threads happen to run.
    kinds = {"data" if name.parent.name == "d" else name.name for name in names}
    assert kinds == {"meta.json", "checksums.json", "manifest.ocdbt", "data"}
    like, good = make_state(0), host(make_state(1))
    checkpointer = opened(folder)
    for name in names:
        damage(folder / name)
        missed = name.relative_to("2").as_posix()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            restored, step, _ = checkpointer.restore(like)
        assert step == 1
        assert host(restored) == good
        said = caplog.text
        assert "step 2" in said
        assert "step 1 is used instead" in said
        assert missed in said
        (aside,) = folder.glob("2.damaged")
        files.remove(aside)
        shutil.copytree(two_steps / "2", folder / "2")
    assert checkpointer.restore(like)[1] == 2


def test_permission_errors_are_not_damage(folder, opened, monkeypatch):
    refused = folder / "2" / "meta.json"

    def open_(path, *arguments, **options):
        if path == refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_)
    with pytest.raises(PermissionError, match=str(refused)):
        opened(folder).restore(make_state(0))
    assert refused.exists()


def test_restore_without_undamaged_step_fails(folder, opened):
    flip_bit(folder / "2" / "meta.json")
    (folder / "1" / "checksums.json").unlink()
    checkpointer = opened(folder)
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore(make_state(0))
        assert "step 2: meta.json is damaged" in str(error.value)
        assert "step 1: checksums.json is missing" in str(error.value)
        assert "move the folder away" in str(error.value)
    assert checkpointer.good_steps() == [1, 2]


def test_renamed_step_folders_are_damaged(two_steps, tmp_path, opened):
    folder = tmp_path / "copy"
    shutil.copytree(two_steps / "1", folder / "7")
    with pytest.raises(CheckpointError, match=r"step 7: .* step 1"):
        opened(folder).restore(make_state(0))


def test_damaged_steps_can_be_saved_again(folder, opened):
    checkpointer = opened(folder)
    for _ in range(2):
        flip_bit(folder / "2" / "meta.json")
        assert checkpointer.restore(make_state(0))[1] == 1
        checkpointer.save(2, make_state(5), {})
        checkpointer.wait()
    assert host(checkpointer.restore(make_state(0))[0]) == host(make_state(5))
    assert {"2.damaged", "2.damaged-2"} <= {path.name for path in folder.iterdir()}


def test_model_mismatch_lists_each_path(two_steps, opened):
    like = make_state(0)
    other = eqx.tree_at(
        lambda s: (s.weights, s.moments[0], s.key),
        like,
        (
            {"w": jnp.zeros((8, 5)), "extra": jnp.zeros(2)},
            like.moments[0].astype(jnp.float32),
            jax.random.split(jax.random.key(0, impl="rbg"), 2),
        ),
    )
    with pytest.raises(CheckpointError) as error:
        opened(two_steps).restore(other)
    lines = str(error.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "key: key<fry>[2] in the checkpoint, key<rbg>[2] in this run",
        "moments.0: bfloat16[8, 4] in the checkpoint, float32[8, 4] in this run",
        "weights.b: float32[4] in the checkpoint, none in this run",
        "weights.extra: none in the checkpoint, float32[2] in this run",
        "weights.w: float32[8, 4] in the checkpoint, float32[8, 5] in this run",
    ]


@pytest.mark.parametrize("spec", ["", "fsdp=8"])
def test_donated_buffers_are_saved_intact(opened, spec):
    mesh = make_mesh(spec)
    checkpointer = opened()
    state = make_state(1, mesh, size=1 << 15)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, eqx.filter(state, eqx.is_array))

    def update(arrays):
        change = lambda x: (
            x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x + x.dtype.type(1)
        )
        return jax.tree.map(change, arrays)

    step_fn = jax.jit(update, donate_argnums=0, out_shardings=shardings)
    arrays, static = eqx.partition(state, eqx.is_array)
    for step in (1, 2):
        expected = host(arrays)
        checkpointer.save(step, eqx.combine(arrays, static), {})
        for _ in range(20):
            arrays = step_fn(arrays)
        restored, _, _ = checkpointer.restore(state_like := make_state(0, mesh, size=1 << 15))
        assert host(restored) == expected
        # What was restored is donated as well.
        again, _ = eqx.partition(restored, eqx.is_array)
        for _ in range(3):
            again = step_fn(again)
        assert host(checkpointer.restore(state_like)[0]) == expected


def test_saving_compiles_nothing(opened):
    compiles = []
    listen = lambda event, *_, **__: compiles.append(event) if "backend_compile" in event else None
    state = make_state(1, make_mesh("data=2,fsdp=2,tensor=2"))
    jax.block_until_ready(eqx.filter(state, eqx.is_array))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        checkpointer = opened()
        for step in (1, 2):
            checkpointer.save(step, state, {})
        checkpointer.wait()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiles


def test_uncommitted_steps_are_discarded(folder, caplog, opened):
    killed = (folder / "2").rename(folder / "2.tmp")
    checkpointer = opened(folder)
    assert "2.tmp" in caplog.text
    assert not killed.exists()
    assert checkpointer.restore(make_state(0))[1] == 1


def test_shortened_checksum_list_is_detected(tmp_path):
    (tmp_path / "a").write_text("a")
    checksums.write(tmp_path)
    assert checksums.problems(tmp_path) == []
    (tmp_path / "extra").write_text("x")
    assert checksums.problems(tmp_path) == []
    content = json.loads((tmp_path / checksums.NAME).read_text())
    content["files"] = {}
    (tmp_path / checksums.NAME).write_text(json.dumps(content))
    assert checksums.problems(tmp_path) == ["checksums.json is damaged"]


@pytest.fixture(scope="module")
def two_large_steps(tmp_path_factory) -> Path:
    """Steps 1 and 2, whose arrays' files are so large that the list has their size alone."""
    folder = tmp_path_factory.mktemp("large")
    checkpointer = Checkpointer(folder)
    for step in (1, 2):
        checkpointer.save(step, make_state(step, make_mesh("fsdp=8"), size=2**17), {})
    checkpointer.close()
    listed = json.loads((folder / "2" / "checksums.json").read_text())["files"]
    assert [name for name, entry in listed.items() if "sha256" not in entry]
    return folder


def test_one_flipped_bit_is_found(two_large_steps, tmp_path, caplog):
    rng = np.random.default_rng(0)
    wanted = host(make_state(1, size=2**17))
    files_of = lambda folder: sorted(path for path in folder.rglob("*") if path.is_file())
    files = files_of(two_large_steps / "2")
    large = [path for path in files if path.stat().st_size > 2**20]
    small = [files[i] for i in rng.permutation(len(files))[:1]]
    assert large
    for number, path in enumerate([*large, *small]):
        folder = tmp_path / str(number)
        shutil.copytree(two_large_steps, folder)
        damaged = folder / path.relative_to(two_large_steps)
        place = int(rng.integers(damaged.stat().st_size))
        flip_bit(damaged, place, int(rng.integers(8)))
        checkpointer = Checkpointer(folder)
        like = skeleton(make_state(0, size=2**17), make_mesh("fsdp=2,tensor=4"))
        state, step, _ = checkpointer.restore(like)
        checkpointer.close()
        assert (step, host(state)) == (1, wanted), (damaged, place)
        assert "step 1 is used instead" in caplog.text
        assert (folder / "2.damaged").is_dir()
        shutil.rmtree(folder)


def test_a_restore_reads_each_byte_once(two_large_steps, monkeypatch):
    """On a mesh whose devices hold parts of several chunks each, however slow the process is."""
    indices = stored_arrays._local_indices

    class Slowly(dict):
        def items(self):
            for item in super().items():
                time.sleep(0.02)  # a chunk is there before its next part is asked for
                yield item

    monkeypatch.setattr(stored_arrays, "_local_indices", lambda target: Slowly(indices(target)))
    sizes = {path: path.stat().st_size for path in (two_large_steps / "2").rglob("d/*")}
    hashed = sum(size for size in sizes.values() if size <= 2**20)  # read for that before
    like = skeleton(make_state(0, size=2**17), make_mesh("tensor=4"))
    for checkpointer in (Checkpointer(two_large_steps), Checkpointer(two_large_steps)):
        before = bytes_read()  # what the process imports at the first time counts, too
        assert checkpointer.restore(like)[1] == 2
        read = bytes_read() - before
        checkpointer.close()
    size = sum(sizes.values())
    assert size / 2 < read < hashed + 1.2 * size


def test_whole_steps_are_verified_byte_by_byte(two_large_steps, tmp_path):
    assert problems(two_large_steps / "2") == []
    assert len(list((two_large_steps / "2").rglob("*"))) > 5
    shutil.copytree(two_large_steps / "2", tmp_path / "2")
    large = max((tmp_path / "2").rglob("d/*"), key=lambda path: path.stat().st_size)
    flip_bit(large)
    [line] = problems(tmp_path / "2")
    assert "cannot be read" in line
    assert "Digest mismatch" in line


def test_arrays_that_may_not_be_read_are_no_damage(two_large_steps, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(two_large_steps, folder)
    refuse = PermissionError("PERMISSION_DENIED")
    monkeypatch.setattr(stored_arrays, "read", lambda *_: (_ for _ in ()).throw(refuse))
    checkpointer = Checkpointer(folder)
    with pytest.raises(PermissionError, match="PERMISSION_DENIED"):
        checkpointer.restore(make_state(0, size=2**17))
    checkpointer.close()
    assert checkpointer.good_steps() == [1, 2]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 3), jnp.bfloat16), ((), jnp.float8_e4m3fn), ((4,), bool), ((0, 3), jnp.int32)],
)
def test_zeros_are_restored(opened, shape, dtype):
    """A chunk of zeros is stored, so that a missing one is an error."""
    checkpointer, state = opened(), {"x": jnp.zeros(shape, dtype), "y": jnp.ones(shape, dtype)}
    checkpointer.save(1, state, {})
    found = checkpointer.restore({name: jnp.full_like(x, 1) for name, x in state.items()})[0]
    for name, x in state.items():
        assert found[name].dtype == dtype
        assert np.asarray(found[name]).tolist() == np.asarray(x).tolist()


TWO_PROCESSES = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from zoo.runs.checkpoint import Checkpointer
mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
def state(step):
    whole = np.arange(2**20, dtype=np.float32).reshape(2, -1) + step
    return {"w": jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])}
checkpointer = Checkpointer(folder)
for step in (1, 2):
    checkpointer.save(step, state(step), {})
checkpointer.wait()
multihost_utils.sync_global_devices("saved")
if process == 0:
    data = [p for p in (folder / "2/arrays/1").rglob("*") if p.is_file()]
    path = max(data, key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
multihost_utils.sync_global_devices("damaged")
found, step, _ = checkpointer.restore(state(0))
same = all((np.asarray(s.data) == np.asarray(t.data)).all()
           for s, t in zip(found["w"].addressable_shards, state(1)["w"].addressable_shards))
print("restored", step, same, flush=True)
checkpointer.close()
"""


def outputs_of_two(program: str, folder: Path, devices: int = 1) -> list[str]:
    """What two processes print that run a program, each with its number, a port and a folder."""
    port = str(free_port())
    environment = {**os.environ, "XLA_FLAGS": xla.flags(devices)}
    command = [sys.executable, "-c", program]
    processes = [
        subprocess.Popen(
            [*command, str(number), port, str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in (0, 1)
    ]  # fmt: skip
    return [process.communicate(timeout=120)[0] for process in processes]


@pytest.mark.slow
def test_a_flipped_bit_of_one_process_is_heeded_by_all(tmp_path):
    for output in outputs_of_two(TWO_PROCESSES, tmp_path):
        assert "restored 1 True" in output, output
    assert (tmp_path / "2.damaged").is_dir()


COPIES = """
import sys
from pathlib import Path
import jax, ml_dtypes, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from zoo.runs import stored_arrays
from zoo.runs.checkpoint import Checkpointer, CheckpointError
mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
bits = np.random.default_rng(0).integers(0, 2**32, (512, 1024), np.uint32)  # NaN and -0, too
bits[0, :2] = 0x80000000, 0
states = {
    "words": (bits.view(np.float32), P("fsdp")),
    "halves": (bits.view(ml_dtypes.bfloat16), P(None, "fsdp")),
    "bytes": (bits.view(np.int8), P()),
    "apart": (bits, P("data")),
    "small": (bits[0], P()),
}
def make(part):
    return {
        name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: part(x[i]))
        for name, (x, spec) in states.items()
    }
checkpointer, read = Checkpointer(folder), {}
checkpointer.save(1, make(lambda x: x), {})
checkpointer.wait()
plain = stored_arrays._read
def remember(*arguments):
    found = plain(*arguments)
    read.update((name, len(parts)) for name, parts in found.items())
    return found
stored_arrays._read = remember
found, *_ = checkpointer.restore(make(np.zeros_like))
for name, (x, spec) in states.items():
    assert found[name].sharding == NamedSharding(mesh, spec)
    for shard in found[name].addressable_shards:
        assert np.asarray(shard.data).tobytes() == x[shard.index].tobytes(), name
print("read", sorted(read.items()), flush=True)
if process == 0:  # what it alone reads
    files = [p for p in (folder / "1/arrays").rglob("*") if p.is_file()]
    for path in files:
        content = bytearray(path.read_bytes())
        if (at := content.find(bits.view(np.int8)[100].tobytes()[:64])) >= 0:
            content[at + 8] ^= 4
            path.write_bytes(content)
multihost_utils.sync_global_devices("damaged")
try:
    checkpointer.restore(make(np.zeros_like))
except CheckpointError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
def test_copies_in_other_processes_are_read_once_and_handed_on(tmp_path):
    first, second = outputs_of_two(COPIES, tmp_path, devices=2)
    read = [("apart", 1), ("bytes", 1), ("halves", 2), ("small", 1), ("words", 2)]
    assert f"read {read}" in first, first
    handed_on = [(name, n * (name in ("apart", "small"))) for name, n in read]
    assert f"read {handed_on}" in second, second
    assert re.search(r"\n  step 1: \w+ cannot be read from", first), first
    assert "step 1: another process cannot read its part" in second, second
