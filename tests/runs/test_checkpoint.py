"""Checkpoints: every bit is restored, every damage is found before anything is read, no kill loses the previous one."""

import itertools
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import PATIENCE, SERVER, dying, joined
from safetensors.torch import load_file, save_file

from sparsellm.runs import checkpoint
from sparsellm.runs.checkpoint import CheckpointError, Checkpoints

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@pytest.fixture
def ranks(tmp_path_factory):
    with joined(tmp_path_factory.mktemp("group") / "store") as ranks:
        yield ranks


def export(weights, folder):
    save_file(weights, folder / "model.safetensors")


def open_(folder, ranks, keep=2):
    return Checkpoints(folder, ranks, keep, export)


def state(version, size=1000):
    """Tensors that all encode their version, so that a mixture of two saves is detected."""
    return {
        "model.weight": torch.full((size,), float(version)),
        "optimizer.exp_avg.weight": torch.full((size,), float(version)),
        "optimizer.step": torch.tensor(float(version)),
    }


def save(checkpoints, step, version=None):
    version = step if version is None else version
    checkpoints.save(step, state(version), {"version": version}, {"rng": bits(step)}, {"rank": 0})
    checkpoints.wait()


def bits(seed):
    return torch.randint(0, 256, (100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def version_of(checkpoints, step, size=1000):
    """The version that every part of the checkpoint agrees on."""
    tensors = state(-1, size)
    values, _, _ = checkpoints.load(step, tensors)
    tensors["hf"] = load_file(checkpoints.folder / f"step_{step:08}" / "hf" / "model.safetensors")["weight"]
    for name, tensor in tensors.items():
        assert torch.equal(tensor, torch.full_like(tensor, values["version"])), name
    return values["version"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(path, bit):
    contents = bytearray(path.read_bytes())
    contents[bit // 8] ^= 1 << bit % 8
    path.write_bytes(contents)


# ---- round trip


def every_dtype():
    tensors = {}
    for dtype in DTYPES:
        size = torch.empty(0, dtype=dtype).element_size()
        for shape in [(), (1,), (3, 5, 7), (0, 4)]:
            count = torch.Size(shape).numel()
            raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * size,), dtype=torch.uint8)
            tensors[f"model.{dtype}.{shape}"] = raw.view(dtype).reshape(shape)  # NaNs of every payload among them
    tensors["optimizer.transposed"] = torch.randn(4, 6).T
    tensors["optimizer.part"] = torch.randn(10, 10)[2:5, ::3]
    tensors["parameter"] = torch.nn.Parameter(torch.randn(3))
    return tensors


def same_bits(a, b):
    a, b = (t.detach().contiguous().view(-1).view(torch.uint8).reshape(-1) for t in (a, b))
    return torch.equal(a, b)


def test_every_dtype_comes_back_bit_for_bit(tmp_path, ranks):
    saved, rank_tensors = every_dtype(), {"torch": torch.get_rng_state(), "empty": torch.empty(0)}
    values, rank_values = {"step": 7, "name": "é", "nested": {"list": [1, 2.5, None]}}, {"losses": [0.1, 1e-300]}
    checkpoints = Checkpoints(tmp_path / "c", ranks, 1, lambda weights, folder: None)
    checkpoints.save(7, saved, values, rank_tensors, rank_values)

    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    got_values, got_rank_values, got_rank_tensors = checkpoints.load(7, loaded)

    assert (got_values, got_rank_values) == (values, rank_values)
    assert got_rank_tensors.keys() == rank_tensors.keys()
    for name, tensor in [*saved.items(), *rank_tensors.items()]:
        got = {**loaded, **got_rank_tensors}[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert same_bits(got, tensor), name


def test_export_gets_the_model_without_its_prefix(tmp_path, ranks):
    exported = {}
    checkpoints = Checkpoints(tmp_path, ranks, 1, lambda weights, folder: exported.update(weights, folder=folder))
    save(checkpoints, 5)
    assert exported.pop("folder") == tmp_path / "step_00000005.partial" / "hf"
    assert exported.keys() == {"weight"}


def hold_the_writer(monkeypatch):
    """An event that the thread waits for before it writes anything."""
    go, write = threading.Event(), Checkpoints._write

    def held(self, *args):
        assert go.wait(PATIENCE)
        write(self, *args)

    monkeypatch.setattr(Checkpoints, "_write", held)
    return go


def test_what_changes_after_save_is_not_written(tmp_path, ranks, monkeypatch):
    go = hold_the_writer(monkeypatch)
    checkpoints = open_(tmp_path, ranks)
    tensors, values, rng, rank_values = state(1), {"version": 1, "list": [1]}, {"rng": bits(1)}, {"list": [1]}
    checkpoints.save(1, tensors, values, rng, rank_values)
    for tensor in [*tensors.values(), *rng.values()]:
        tensor.fill_(9)
    values["version"], values["list"][0], rank_values["list"][0] = 9, 9, 9
    go.set()

    assert version_of(checkpoints, 1) == 1
    values, rank_values, rank_tensors = checkpoints.load(1, state(0))
    assert values == {"version": 1, "list": [1]}
    assert rank_values == {"list": [1]}
    assert torch.equal(rank_tensors["rng"], bits(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_changes_on_the_gpu_after_save_is_not_written(tmp_path):
    with joined(tmp_path / "store", device="cuda") as ranks:
        checkpoints = open_(tmp_path / "c", ranks)
        size = 1 << 26
        tensors = {name: tensor.cuda() for name, tensor in state(0, size).items()}
        for step in range(1, 4):
            for tensor in tensors.values():
                tensor.fill_(step)
            checkpoints.save(step, tensors, {"version": step}, {}, {})
            for tensor in tensors.values():
                tensor.fill_(-step)
            assert version_of(checkpoints, step, size) == step
        checkpoints.load(2, tensors)
        assert all(tensor.is_cuda and torch.all(tensor == 2) for tensor in tensors.values())


def test_a_second_save_waits_for_the_first(tmp_path, ranks, monkeypatch):
    go = hold_the_writer(monkeypatch)
    checkpoints = open_(tmp_path, ranks)
    checkpoints.save(1, state(1), {"version": 1}, {}, {})
    assert names(tmp_path) == []
    threading.Timer(0.2, go.set).start()
    checkpoints.save(2, state(2), {"version": 2}, {}, {})
    assert "step_00000001" in names(tmp_path)
    assert checkpoints.find(skip_damaged=False) == 2


def test_values_that_are_not_json_are_refused_at_once(tmp_path, ranks):
    with pytest.raises(CheckpointError, match=r"step 3 failed: rank 0: TypeError: .*Tensor.* not JSON"):
        open_(tmp_path, ranks).save(3, state(3), {"loss": torch.zeros(())}, {}, {})
    assert names(tmp_path) == []


def test_tensors_named_like_those_of_a_rank_are_refused(tmp_path, ranks):
    with pytest.raises(CheckpointError, match=r"rank\.00001\.rng"):
        open_(tmp_path, ranks).save(3, {"rank.00001.rng": bits(0)}, {}, {}, {})


# ---- what is kept


def test_the_last_ones_are_kept(tmp_path, ranks):
    checkpoints = open_(tmp_path, ranks, keep=2)
    assert checkpoints.find(skip_damaged=False) is None
    for step in (1, 2, 10):
        save(checkpoints, step)
    assert names(tmp_path) == ["step_00000002", "step_00000010"]
    assert checkpoints.find(skip_damaged=False) == 10
    assert [version_of(checkpoints, step) for step in (2, 10)] == [2, 10]


def test_a_step_reached_again_replaces_the_old_one(tmp_path, ranks):
    checkpoints = open_(tmp_path, ranks)
    save(checkpoints, 4, version=1)
    save(checkpoints, 4, version=2)
    assert names(tmp_path) == ["step_00000004"]
    assert checkpoints.find(skip_damaged=False) == 4
    assert version_of(checkpoints, 4) == 2


def test_opening_clears_what_a_kill_left_and_nothing_else(tmp_path, ranks, capsys):
    save(open_(tmp_path, ranks), 4)
    for left in ("step_00000005.partial", "step_00000003.deleting", "step_00000004.replaced"):
        (tmp_path / left / "state").mkdir(parents=True)
    for kept in ("step_00000002.damaged", "notes.partial"):
        (tmp_path / kept).mkdir()
    (tmp_path / "step_00000004").rename(tmp_path / "step_00000001.replaced")
    (tmp_path / "step_00000004").mkdir()
    open_(tmp_path, ranks)
    assert names(tmp_path) == ["notes.partial", "step_00000001", "step_00000002.damaged", "step_00000004"]
    assert "step_00000005.partial" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["partial", "replaced", "deleting"])
def test_a_link_in_the_place_of_what_a_kill_leaves_is_removed_alone(tmp_path, ranks, kind):
    other, folder = tmp_path / "other", tmp_path / "c"
    (other / "precious").mkdir(parents=True)
    save(open_(folder, ranks), 4)
    for step, target in [(3, other), (4, other), (5, tmp_path / "nothing")]:
        (folder / f"step_{step:08}.{kind}").symlink_to(target)

    checkpoints = open_(folder, ranks)
    # `replaced` is restored, and is then a damaged checkpoint.
    back = ["step_00000003", "step_00000005"] if kind == "replaced" else []
    assert names(folder) == sorted([*back, "step_00000004"])
    for name in back:
        (folder / name).unlink()
    save(checkpoints, 4, version=8)
    assert version_of(checkpoints, 4) == 8
    assert names(other) == ["precious"]


# ---- damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "a flipped bit in the tensors": ("state/__0_0.distcp", lambda path: flip(path, 8 * 3000), "checksum"),
    "a flipped bit in the pickle": ("state/.metadata", lambda path: flip(path, 100), "checksum"),
    "a flipped bit in the values": ("state/values.json", lambda path: flip(path, 9), "checksum"),
    "a flipped bit in the export": ("hf/model.safetensors", lambda path: flip(path, 8 * 200), "checksum"),
    "a truncated file": ("state/__0_0.distcp", truncate, "bytes instead of"),
    "a missing file": ("state/rank_00000.json", Path.unlink, "is missing"),
    "an extra file": ("state/__1_0.distcp", lambda path: path.write_bytes(b""), "is not listed in COMMITTED"),
    "a file turned into a folder": ("hf/model.safetensors", lambda path: (path.unlink(), path.mkdir()), "is missing"),
    "no commit": ("COMMITTED", Path.unlink, "is missing"),
    "a truncated commit": ("COMMITTED", truncate, "cannot be read"),
    "a commit that is not one": ("COMMITTED", lambda path: path.write_text("[1]"), "cannot be read"),
    "the commit of another step": (
        "COMMITTED", lambda path: path.write_text(path.read_text().replace('"step": 2', '"step": 3')), "to step 3",
    ),
}  # fmt: skip


@pytest.fixture
def two_saved(tmp_path, ranks, monkeypatch):
    """Checkpoints 1 and 2 in tmp_path/c, in a process where nothing in them may be read by DCP."""
    folder = tmp_path / "c"
    checkpoints = open_(folder, ranks)
    save(checkpoints, 1)
    save(checkpoints, 2)

    def forbidden(*args, **kwargs):
        pytest.fail("read before it was verified")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.dcp, "load", forbidden)
        patch.setattr(checkpoint.dcp, "FileSystemReader", forbidden)
        yield folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_before_anything_is_read(two_saved, ranks, damage):
    name, inflict, what = DAMAGES[damage]
    inflict(two_saved / "step_00000002" / name)
    checkpoints = open_(two_saved, ranks)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.find(skip_damaged=False)
    message = str(raised.value)
    assert f"step_00000002 is damaged: {name} " in message
    assert what in message
    assert "run.skip_damaged=true resumes from step 1 before it" in message
    with pytest.raises(CheckpointError, match="step_00000002 is damaged"):
        checkpoints.load(2, state(0))
    assert names(two_saved) == ["step_00000001", "step_00000002"]


def test_every_flipped_bit_of_the_commit_is_found(two_saved, ranks):
    checkpoints, path = open_(two_saved, ranks), two_saved / "step_00000002" / "COMMITTED"
    contents = path.read_text()
    for bit in random.Random(0).sample(range(8 * len(contents)), 200):
        if not contents[bit // 8].isspace():
            flip(path, bit)
            with pytest.raises(CheckpointError, match="step_00000002 is damaged"):
                checkpoints.find(skip_damaged=False)
            path.write_text(contents)
    assert checkpoints.find(skip_damaged=False) == 2


def test_a_damaged_checkpoint_is_skipped_when_the_user_says_so(two_saved, ranks, capsys, monkeypatch):
    flip(two_saved / "step_00000002" / "state" / "__0_0.distcp", 8 * 3000)
    (two_saved / "step_00000002.damaged").mkdir()  # the same step was damaged before
    assert open_(two_saved, ranks).find(skip_damaged=True) == 1
    assert names(two_saved) == ["step_00000001", "step_00000002.damaged", "step_00000002.damaged-2"]
    said = capsys.readouterr().err
    assert "step_00000002 is damaged: state/__0_0.distcp has checksum" in said
    assert "resumes from step 1" in said


def test_the_step_to_fall_back_to_is_a_whole_one(two_saved, ranks, capsys):
    for step in ("step_00000001", "step_00000002"):
        truncate(two_saved / step / "state" / ".metadata")
    checkpoints = open_(two_saved, ranks)
    with pytest.raises(CheckpointError, match="skip_damaged=true starts from the beginning") as raised:
        checkpoints.find(skip_damaged=False)
    assert "step_00000001 is damaged" in str(raised.value)
    assert "step_00000002 is damaged" in str(raised.value)
    assert checkpoints.find(skip_damaged=True) is None
    assert names(two_saved) == ["step_00000001.damaged", "step_00000002.damaged"]
    assert "starts from the beginning" in capsys.readouterr().err


def test_a_damaged_one_behind_a_whole_one_is_left_alone(two_saved, ranks):
    truncate(two_saved / "step_00000001" / "state" / ".metadata")
    assert open_(two_saved, ranks).find(skip_damaged=False) == 2


# ---- a state of another shape


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("optimizer.step"), "optimizer.step is unknown to this run"),
        (lambda t: t.update({"model.bias": torch.zeros(2)}), "model.bias is missing from the checkpoint"),
        (
            lambda t: t.update({"model.weight": torch.zeros(10, 100)}),
            "model.weight is torch.float32 [1000] in the checkpoint, but torch.float32 [10, 100] here",
        ),
        (
            lambda t: t.update({"model.weight": torch.zeros(1000, dtype=torch.bfloat16)}),
            "model.weight is torch.float32 [1000] in the checkpoint, but torch.bfloat16 [1000] here",
        ),
    ],
    ids=["extra", "missing", "shape", "dtype"],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(tmp_path, ranks, change, named):
    checkpoints = open_(tmp_path, ranks)
    save(checkpoints, 1)
    tensors = state(-1)
    change(tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(1, tensors)
    assert named in str(raised.value)
    assert "step_00000001 does not fit" in str(raised.value)
    differences = (" in the checkpoint, but", "missing from the checkpoint", "unknown to this run")
    assert sum(str(raised.value).count(words) for words in differences) == 1
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def test_a_wholly_different_state_gives_a_short_message(tmp_path, ranks):
    checkpoints = open_(tmp_path, ranks)
    save(checkpoints, 1)
    with pytest.raises(CheckpointError, match="and 95 more") as raised:
        checkpoints.load(1, {f"other.{i}": torch.zeros(1) for i in range(100)})
    assert len(str(raised.value)) < 1000


# ---- failures


def test_a_failing_export_surfaces_and_the_previous_one_stays(tmp_path, ranks):
    fails = []

    def export_or_fail(weights, folder):
        if fails:
            raise ValueError("no tokenizer")
        export(weights, folder)

    checkpoints = Checkpoints(tmp_path, ranks, 1, export_or_fail)
    save(checkpoints, 1)
    fails.append(True)
    checkpoints.save(2, state(2), {"version": 2}, {}, {})
    with pytest.raises(
        CheckpointError, match=r"saving step 2 .*step_00000002 failed: rank 0: ValueError: no tokenizer"
    ):
        checkpoints.wait()
    checkpoints.wait()  # said once
    assert checkpoints.find(skip_damaged=False) == 1
    assert version_of(checkpoints, 1) == 1

    checkpoints.save(3, state(3), {"version": 3}, {}, {})
    with pytest.raises(CheckpointError, match="saving step 3"):
        checkpoints.save(4, state(4), {"version": 4}, {}, {})
    fails.clear()
    save(checkpoints, 5)
    assert names(tmp_path) == ["step_00000005"]


def test_a_full_disk_surfaces_and_the_previous_one_stays(tmp_path, ranks, monkeypatch):
    checkpoints = open_(tmp_path, ranks, keep=1)
    save(checkpoints, 1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for patched in ((checkpoint.dcp.FileSystemWriter, "write_data"), (checkpoint, "sync"), (checkpoint, "seal")):
        with monkeypatch.context() as patch:
            patch.setattr(*patched, full)
            with pytest.raises(CheckpointError, match=r"saving step 2 .* failed: the disk is full"):
                save(checkpoints, 2)
        assert checkpoints.find(skip_damaged=False) == 1
        assert version_of(checkpoints, 1) == 1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, ranks):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"opening .*file/c failed"):
        open_(tmp_path / "file" / "c", ranks)


# ---- kill -9


def victim(store, folder, first, fatal):
    """Saves steps endlessly; with `fatal`, replaces step 2, saves 3, and kills itself before that file operation."""
    with joined(store) as ranks:
        checkpoints = open_(folder, ranks)
        if fatal is not None:
            dying(fatal)
            save(checkpoints, 2, version=20)
            save(checkpoints, 3)
            return
        for step in itertools.count(first):
            checkpoints.save(step, state(step, size=300_000), {"version": step}, {"rng": bits(step)}, {})


@pytest.mark.slow
def test_killed_before_any_file_operation(tmp_path, ranks):
    """One victim for each creation, renaming and removal in two saves, with a replaced step and a pruned one."""
    outcomes = set()
    for fatal in itertools.count(1):
        folder = tmp_path / str(fatal)
        checkpoints = open_(folder, ranks)
        save(checkpoints, 1)
        save(checkpoints, 2)
        process = SERVER.Process(target=victim, args=(tmp_path / f"store{fatal}", folder, 0, fatal))
        process.start()
        process.join(PATIENCE)
        if process.exitcode == 0:  # it has fewer operations than that
            break
        assert process.exitcode == -signal.SIGKILL
        checkpoints = open_(folder, ranks)
        step = checkpoints.find(skip_damaged=False)
        version = version_of(checkpoints, step)
        outcomes.add((step, version))
        assert all(json.loads((path / "COMMITTED").read_text()) for path in folder.iterdir())
        save(checkpoints, 4)
        assert names(folder) == [f"step_{kept:08}" for kept in (step, 4)]
    assert fatal > 30
    assert outcomes == {(2, 2), (2, 20), (3, 3)}


@pytest.mark.slow
def test_killed_at_random_instants(tmp_path, ranks):
    """One run of six victims, each resuming where the one before was killed."""
    folder, choice = tmp_path / "c", random.Random(0)
    step = 0
    for attempt in range(6):
        process = SERVER.Process(target=victim, args=(tmp_path / f"store{attempt}", folder, step + 1, None))
        process.start()
        deadline = time.monotonic() + PATIENCE
        while not (folder / f"step_{step + 1:08}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(choice.uniform(0, 0.3))
        process.kill()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
        checkpoints = open_(folder, ranks)
        found = checkpoints.find(skip_damaged=False)
        assert found > step
        assert version_of(checkpoints, found, size=300_000) == found
        _, _, rank_tensors = checkpoints.load(found, state(0, size=300_000))
        assert torch.equal(rank_tensors["rng"], bits(found))
        step = found


# ---- two ranks


def on_two_ranks(tmp_path, work):
    """What `work(ranks, folder)` returns on each of two ranks. An exception of one of them is raised."""
    store = tmp_path / f"store_{work.__name__}"
    with ProcessPoolExecutor(2, SERVER) as pool:
        futures = [pool.submit(as_rank, store, rank, work, tmp_path / "c") for rank in range(2)]
        return [future.result(PATIENCE) for future in futures]


def as_rank(store, rank, work, folder):
    with joined(store, rank, world_size=2) as ranks:
        return work(ranks, folder)


def save_as_two(ranks, folder):
    checkpoints = open_(folder, ranks)
    for step in (1, 2):
        rank_tensors = {"rng": bits(10 * step + ranks.rank)}
        checkpoints.save(step, state(step), {"version": step, "by": ranks.rank}, rank_tensors, {"rank": ranks.rank})
    checkpoints.wait()
    return names(folder / "step_00000002" / "state")


def load_as_two(ranks, folder):
    checkpoints = open_(folder, ranks)
    step = checkpoints.find(skip_damaged=False)
    version_of(checkpoints, step)
    return step, *checkpoints.load(step, state(0))


def test_two_ranks_save_and_two_or_one_load(tmp_path, ranks):
    for files in on_two_ranks(tmp_path, save_as_two):
        assert {"__0_0.distcp", "__1_0.distcp", "rank_00000.json", "rank_00001.json"} <= set(files)
    sizes = [(tmp_path / "c/step_00000002/state" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 1.5 * min(sizes)  # each tensor was written once, by one of them

    for rank, (step, values, rank_values, rank_tensors) in enumerate(on_two_ranks(tmp_path, load_as_two)):
        assert (step, values, rank_values) == (2, {"version": 2, "by": 0}, {"rank": rank})
        assert torch.equal(rank_tensors["rng"], bits(20 + rank))

    step, values, rank_values, rank_tensors = load_as_two(ranks, tmp_path / "c")
    assert (step, values, rank_values) == (2, {"version": 2, "by": 0}, {"rank": 0})
    assert torch.equal(rank_tensors["rng"], bits(20))


def test_a_rank_that_did_not_exist_gets_what_rank_0_had(tmp_path, ranks):
    checkpoints = open_(tmp_path / "c", ranks)
    save(checkpoints, 1)
    for step, values, rank_values, rank_tensors in on_two_ranks(tmp_path, load_as_two):
        assert (step, values, rank_values) == (1, {"version": 1}, {"rank": 0})
        assert torch.equal(rank_tensors["rng"], bits(1))


def fail_on_the_second_rank(ranks, folder):
    """What each rank is told when the second one fails: while copying, inside DCP, after it, and while loading."""
    told = []
    checkpoints = open_(folder, ranks)
    save(checkpoints, 1)

    def attempt(work):
        try:
            work()
        except CheckpointError as error:
            told.append(str(error))

    def fail(*args):
        raise OSError("broken disk")

    def save_with(rank_values):
        checkpoints.save(2, state(2), {"version": 2}, {}, rank_values)
        checkpoints.wait()

    second = ranks.rank == 1
    attempt(lambda: save_with({"rng": object()} if second else {}))
    for patched in ((checkpoint.dcp.FileSystemWriter, "write_data"), (checkpoint, "sync")):
        with pytest.MonkeyPatch.context() as patch:
            if second:
                patch.setattr(*patched, fail)
            attempt(lambda: save_with({}))
    attempt(lambda: checkpoints.load(1, {} if second else state(0)))
    found = checkpoints.find(skip_damaged=False)
    save_with({})
    return told, found, checkpoints.find(skip_damaged=False)


def test_what_fails_on_one_rank_is_raised_on_both(tmp_path):
    (told, *found), other = on_two_ranks(tmp_path, fail_on_the_second_rank)
    assert other == (told, *found)
    assert found == [1, 2]
    assert len(told) == 4
    assert "copying the state of step 2 failed: rank 1: TypeError" in told[0]
    assert all("saving step 2" in text and "rank 1: OSError: broken disk" in text for text in told[1:3])
    assert "model.weight is unknown to this run" in told[3]


def die_while_saving(store, folder, rank, told):
    with joined(store, rank, world_size=2) as ranks:
        checkpoints = open_(folder, ranks)
        save(checkpoints, 1)
        if rank == 1:
            checkpoint.dcp.save = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        try:
            save(checkpoints, 2)
        except CheckpointError as error:
            told.put(str(error))


def test_a_rank_that_dies_does_not_leave_the_other_waiting(tmp_path, ranks):
    told = SERVER.Queue()
    processes = [
        SERVER.Process(target=die_while_saving, args=(tmp_path / "dying", tmp_path / "c", rank, told))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    assert "saving step 2" in told.get(timeout=PATIENCE)
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    assert open_(tmp_path / "c", ranks).find(skip_damaged=False) == 1


def test_the_size_of_what_another_process_takes_away_meanwhile_is_counted_as_far_as_it_is_there(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "a").write_bytes(b"123")
    (tmp_path / "b").write_bytes(b"12345")
    (tmp_path / "c").write_bytes(b"1")
    assert checkpoint.size_of(tmp_path) == 9
    assert checkpoint.size_of(tmp_path / "gone") == 0
    stat = Path.stat

    def without_b(path, *arguments, **named):
        if path.name == "b":
            raise FileNotFoundError(path)
        return stat(path, *arguments, **named)

    monkeypatch.setattr(Path, "stat", without_b)
    assert checkpoint.size_of(tmp_path) == 4
