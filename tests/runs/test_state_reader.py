"""A checkpoint from someone else runs nothing on resume, and our own checkpoints are read completely."""

import os
import pickle
import pickletools
import shutil

import pytest
import torch
from processes import joined
from torch.distributed.checkpoint import metadata as dcp

from sparsellm.runs.checkpoint import CheckpointError, Checkpoints
from sparsellm.runs.committed import seal
from sparsellm.runs.layout import COMMITTED, STATE
from sparsellm.runs.state_reader import NAMES, StateReader


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A group of one rank, and a folder with its checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("c")
    with joined(tmp_path_factory.mktemp("group") / "store") as ranks:
        checkpoints = Checkpoints(folder, ranks, 1, lambda weights, folder: None)
        checkpoints.save(1, {"model.weight": torch.arange(5.0)}, {"step": 1}, {"rng": torch.arange(3)}, {})
        checkpoints.wait()
        yield ranks, folder


class Calls:
    """Pickled, a call of `function` as it is read."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


class Named:
    """Pickled, the object that `name` leads to from `module`, and a call of it."""

    def __init__(self, module, name, argument):
        self.spelled = b"\x80\x04" + b"".join(
            b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)
        ) + b"\x93\x8c" + bytes([len(argument)]) + argument.encode() + b"\x85R."  # fmt: skip


def changed(file, change):
    found = StateReader(file.parent).read_metadata()
    change(found)
    return pickle.dumps(found)


def bytes_entry(found):
    found.state_dict_metadata["model.weight"] = dcp.BytesStorageMetadata()


def led_away(found):
    for info in found.storage_data.values():
        info.relative_path = f"../../../{info.relative_path}"


# Content of .metadata, by the refused name.
PLANTED = {
    "posix.system": lambda file, marker: pickle.dumps(Calls(os.system, f"touch {marker}")),
    "builtins.exec": lambda file, marker: pickle.dumps({"a": Calls(exec, f"open({str(marker)!r}, 'w')")}),
    # Found from a module whose other names are known.
    "torch.distributed.checkpoint.metadata.os.system": lambda file, marker: (
        Named("torch.distributed.checkpoint.metadata", "os.system", f"touch {marker}").spelled
    ),
    "torch.load": lambda file, marker: Named("torch", "load", str(marker)).spelled,
    # Bytes that DCP would unpickle.
    "BytesStorageMetadata": lambda file, marker: changed(file, bytes_entry),
    "not a file in its folder": lambda file, marker: changed(file, led_away),
    "holds a dict": lambda file, marker: pickle.dumps({}),
}


@pytest.mark.parametrize("named", PLANTED)
def test_what_no_checkpoint_of_ours_holds_is_refused_by_name_and_does_not_run(saved, tmp_path, named):
    ranks, folder = saved
    shutil.copytree(folder, tmp_path / "c")
    step, marker = tmp_path / "c" / "step_00000001", tmp_path / "was_run"
    file = step / STATE / ".metadata"
    file.write_bytes(PLANTED[named](file, marker))
    (step / COMMITTED).unlink()
    seal(step, 1)  # as an attacker would

    checkpoints = Checkpoints(tmp_path / "c", ranks, 1, lambda weights, folder: None)
    assert checkpoints.find(skip_damaged=False) == 1
    target = {"model.weight": torch.zeros(5)}
    with pytest.raises(CheckpointError) as refused:
        checkpoints.load(1, target)

    said = str(refused.value)
    assert named in said
    assert str(file) in said
    assert "\n" not in said
    assert not marker.exists()
    assert not target["model.weight"].any()


def test_ours_is_read_as_dcp_reads_it(saved):
    _, folder = saved
    state = folder / "step_00000001" / STATE
    found, plain = StateReader(state).read_metadata(), pickle.loads((state / ".metadata").read_bytes())
    assert found.state_dict_metadata == plain.state_dict_metadata
    assert found.storage_data == plain.storage_data


def test_ours_names_nothing_that_is_not_needed(saved):
    """Each name but the dtypes occurs in a checkpoint, so that the list grows by no accident."""
    _, folder = saved
    texts = {
        argument
        for _, argument, _ in pickletools.genops((folder / "step_00000001" / STATE / ".metadata").read_bytes())
        if isinstance(argument, str)
    }
    assert {name for module, name in NAMES if not isinstance(getattr(torch, name, None), torch.dtype)} <= texts
