"""A trace of exactly the requested steps."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from small_run import signal_after, small_trainer

from sparsellm.config import ConfigError, from_overrides
from sparsellm.distributed.groups import Ranks
from sparsellm.training import profile
from sparsellm.training.profile import Profile

TRACED = ["runtime.profile_steps=[5,6]", "run.checkpoint_every=2"]


def steps(trace: Path) -> list[int]:
    """The steps in the trace; checks that each contains a forward pass."""
    events = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    products = [e["ts"] for e in events if e["name"] == "aten::mm"]
    named = {e["name"]: e for e in events if e["name"].startswith("step ")}
    assert all(any(e["ts"] <= ts <= e["ts"] + e["dur"] for ts in products) for e in named.values())
    return [int(name.removeprefix("step ")) for name in sorted(named)]


@pytest.mark.slow
def test_the_steps_that_were_asked_for_are_traced_once(tmp_path, capsys, monkeypatch):
    with small_trainer(tmp_path, *TRACED) as trainer:
        signal_after(trainer, 8)
        assert trainer.fit() > 128
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "steps_5-6.rank_00000.json.gz"
    assert steps(trace) == [5, 6]
    said = capsys.readouterr().err
    assert said.index(f"profile of steps 5 to 6: {trace} (") < said.index("step  9/12")  # as soon as it is written
    trace.unlink()
    monkeypatch.setattr(profile, "profiler", None)  # which a resume past those steps does not ask for
    with small_trainer(tmp_path, *TRACED) as trainer:
        assert trainer.fit() == 0
    assert not any((tmp_path / "profile").iterdir())


@pytest.mark.slow
def test_a_run_that_stops_among_them_traces_both_parts(tmp_path):
    traced = ["runtime.profile_steps=[2,6]", "logging.every=1"]
    for last in (3, None):
        with small_trainer(tmp_path, *traced) as trainer:
            if last is not None:
                signal_after(trainer, last)
            trainer.fit()
    found = {path.name: steps(path) for path in (tmp_path / "profile").iterdir()}
    # The stop request arrives in step 4, and is read after its validation.
    assert found == {"steps_2-4.rank_00000.json.gz": [2, 3, 4], "steps_5-6.rank_00000.json.gz": [5, 6]}


def test_a_trace_that_cannot_be_written_is_said_and_training_goes_on(tmp_path, capsys):
    (tmp_path / "profile").write_text("")
    with small_trainer(tmp_path, *TRACED) as trainer:
        assert trainer.fit() == 0
    assert "the profile of steps 5 to 6 cannot be written" in capsys.readouterr().err


def test_every_rank_writes_one_and_the_main_one_says_so(tmp_path, capsys):
    for rank in (0, 1):
        ranks = Ranks(rank=rank, world_size=2, device=torch.device("cpu"), checkpoint_group=None)
        with Profile([1, 1], tmp_path, ranks).step(1):
            pass
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == [f"steps_1-1.rank_0000{rank}.json.gz" for rank in (0, 1)]
    assert capsys.readouterr().err.count("and one for each of the 2 ranks") == 1


def test_steps_are_typed_as_whole_numbers():
    assert from_overrides(["runtime.profile_steps=[20,22]"]).runtime.profile_steps == [20, 22]
    for wrong in ("20", "[a,b]", "[1.5,2]", "[true,2]"):
        with pytest.raises(ConfigError, match="it should be a list of whole numbers, like \\[1,2\\]"):
            from_overrides([f"runtime.profile_steps={wrong}"])
