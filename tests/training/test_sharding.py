"""Sharded models train like replicated ones, and any layout of ranks resumes checkpoints of any other."""

import os
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from processes import PATIENCE, SERVER, joined
from safetensors.torch import load_file
from small_run import RandomTokens, small_config
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from sparsellm.config import ConfigError, moments
from sparsellm.distributed.groups import whole
from sparsellm.ops import build
from sparsellm.policy import Policy, first_use
from sparsellm.runs.checkpoint import Checkpoints
from sparsellm.training import loop, muon, sharding
from sparsellm.training.loop import Trainer

SHARDS = ("none", "optimizer", "full")
WORLDS = (1, 2, 4)
# Three layers; 97 rows over 2 or 4 ranks make shards of different sizes.
SMALL = ["model.num_layers=3", "model.vocab_size=97", "runtime.deterministic=true", "runtime.micro_batch_size=1"]

pytestmark = pytest.mark.slow


def on_ranks(worlds, work, *args):
    """`work(rank, world_size, *args)` in a process for each rank of each of `worlds`, at the same time: its results, by
    world and rank. An exception of one of them is raised."""
    with ProcessPoolExecutor(sum(worlds), SERVER) as pool:
        tasks = {n: [pool.submit(work, rank, n, *args) for rank in range(n)] for n in worlds}
        return {n: [task.result(3 * PATIENCE) for task in of_world] for n, of_world in tasks.items()}


def trainer_in(folder, ranks, *overrides):
    folder.mkdir(parents=True, exist_ok=True)
    config = small_config(*SMALL, *overrides)
    return Trainer(config, ranks, RandomTokens(config, ranks.rank, ranks.world_size, folder), folder)


def wholes(tensors):
    return {name: whole(tensor).detach().clone() for name, tensor in tensors.items()}


def state(trainer):
    return wholes(trainer._tensors(trainer.silent.reduced()))


# ---- the same training

# Few tokens per step and many neurons: some do not fire.
DRAWN_ANEW = [
    "training.sequence_length=1", "model.intermediate_size=480", "sparsity.reinit_dead_after_tokens=2",
    "sparsity.reinit_every=2", "optimizer.grad_clip=0.5",
]  # fmt: skip
COMPILED = ["runtime.recompute=true", "runtime.precision=bfloat16", "runtime.compile=true"]
# Features that the paper's models lack: each rank has rows of biases and of an output matrix.
ATTENTION = [
    "model.num_key_value_heads=1", "model.head_dim=24", "model.attention_bias=true", "model.tie_embeddings=false",
]  # fmt: skip
# (name, overrides, ways on one node, ways on two)
RUNS = [
    ("drawn anew", DRAWN_ANEW, SHARDS, SHARDS[1:]), ("compiled", COMPILED, ["none", "full"], []),
    ("attention", ATTENTION, ["none", "optimizer"], []), ("muon", ["optimizer.muon=true"], ["none", "full"], []),
]  # fmt: skip
STEPS, COUNTED = 4, 2


def train(folder, ranks, shard, nodes, overrides):
    """A sharded run: its weights before and after, each step's numbers, communication, and memory."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks.world_size // nodes)
    trainer = trainer_in(folder / f"{shard}-{nodes}", ranks, f"runtime.shard={shard}", *overrides)
    drawn, random = wholes(trainer.optimizer.parameters), torch.get_rng_state()
    rows, batches = [], trainer.data.batches(None)
    for step in range(1, STEPS + 1):
        with profile(activities=[ProfilerActivity.CPU]) if step == COUNTED else nullcontext() as profiled:
            sums, norm, clock = trainer.advance(batches)
        if step == COUNTED:
            sent = Counter(event.name for event in profiled.events() if event.name.startswith("c10d::"))
        values = trainer._reduce(sums, norm, clock, False).read()
        counted = {"nnz": values.nnz, "dead": values.dead, "reinitialized": values.reinitialized or []}
        rows.append({"ce": values.ce, "l1": values.l1, "norm": values.grad_norm} | counted)
        if step == STEPS // 2:
            rows.append({"validation": trainer._validate().ce})
    parameters = trainer.optimizer.parameters
    kept = [p.to_local() if isinstance(p, DTensor) else p for p in parameters.values()]
    trainer._validate()  # leaves weights gathered that a step computes with
    evaluated = wholes(trainer.decoder.state_dict())
    return {
        "drawn": drawn, "random": random, "rows": rows, "sent": sent, "state": state(trainer),
        "kept": sum(p.numel() for p in kept), "all": sum(p.numel() for p in parameters.values()),
        "evaluated": all(torch.equal(evaluated[name], tensor) for name, tensor in wholes(parameters).items()),
    }  # fmt: skip


def train_every_way(rank, world_size, folder):
    with (
        joined(folder / "store", rank, world_size) as ranks,
        # The dense engine of the operator, on the terms of the kernels: accelerated blocks, whose plans decide.
        patch.object(loop, "takes_kernels", lambda runtime, *_: runtime.compile),
        patch.multiple(build, load=lambda: None, loaded=lambda: True),
        # There is no GPU to ask for its name.
        patch.object(first_use, "policy_for", lambda *_: Policy()),
        # The graphs matter here, which torch's shards must not break, and this backend is quick.
        patch.object(torch, "compile", partial(torch.compile, backend="eager")),
    ):
        found = {}
        for name, overrides, *ways in RUNS:
            for nodes, shards in enumerate(ways, 1):
                for shard in shards:
                    found[name, shard, nodes] = train(folder / name, ranks, shard, nodes, overrides)
        os.environ["LOCAL_WORLD_SIZE"] = "2" if rank else "1"
        with pytest.raises(ConfigError, match="nodes have 1 and 2 ranks, but sharding needs the same number on each"):
            trainer_in(folder / "uneven", ranks, "runtime.shard=full")
        return found


def test_shards_train_as_copies_do_send_what_they_should_and_keep_their_share(tmp_path):
    results = on_ranks([4], train_every_way, tmp_path)[4]
    for name, shard, nodes in results[0]:
        run = [result[name, shard, nodes] for result in results]
        copies = results[0][name, "none", 1]
        for each in run:
            assert each["evaluated"]
            assert torch.equal(each["random"], copies["random"])
            assert all(torch.equal(each["drawn"][key], copies["drawn"][key]) for key in copies["drawn"])
            assert all(torch.equal(each["state"][key], run[0]["state"][key]) for key in run[0]["state"])
            assert each["rows"] == run[0]["rows"]
        for row, expected in zip(run[0]["rows"], copies["rows"], strict=True):
            # float32 sums in another order; in bfloat16 a last bit of it now and then, which Muon's iterations amplify
            rel = 1e-3 if name == "muon" else 1e-5
            assert row == {key: pytest.approx(value, rel=rel) for key, value in expected.items()}
        if name == "drawn anew":
            assert all(count > 0 for count in run[0]["rows"][-1]["reinitialized"])

        ranks_that_share = 1 if shard == "none" else 4 // nodes
        largest = max(each["kept"] for each in run)
        assert run[0]["all"] / ranks_that_share <= largest < 1.02 * run[0]["all"] / ranks_that_share
        assert sum(each["kept"] for each in run) == 4 // ranks_that_share * run[0]["all"]

        # Three layers and the rest, which `full` gathers in each of two micro-batches, and layers again for backward.
        sent = run[0]["sent"]
        assert sent["c10d::_allgather_base_"] == {"none": 0, "optimizer": 4, "full": 2 * (4 + 3)}[shard]
        assert sent["c10d::_reduce_scatter_base_"] == (0 if shard == "none" else 2 * 4)
        if shard != "none":
            of_one_node = results[0][name, shard, 1]["sent"]["c10d::allreduce_"]
            assert sent["c10d::allreduce_"] == of_one_node + (4 if nodes == 2 else 0)


# ---- saved and resumed in any shape


def save_and_resume(rank, world_size, folder):
    """Train and save three states; once all nine exist, resume each in one way. The three launches take other ways, and
    each launch takes each way three times. Returns the differences."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    with joined(folder / f"store-{world_size}", rank, world_size) as ranks:
        for shard in SHARDS:
            trainer = trainer_in(folder / f"{shard}-{world_size}", ranks, f"runtime.shard={shard}", "training.steps=2")
            trainer._resume()
            saved = lambda: SimpleNamespace(_asdict=lambda: None)  # noqa: E731
            metrics = SimpleNamespace(saved=saved, telling=[])
            log = SimpleNamespace(metrics=metrics, unwritten=lambda _step: None, gone=lambda _step: None)
            trainer.log = log if ranks.is_main else None
            batches = trainer.data.batches(None)
            for _ in range(2):
                trainer.advance(batches)
            saved = state(trainer)
            go, write = threading.Event(), Checkpoints._write
            with patch.object(Checkpoints, "_write", lambda *args, go=go, write=write: go.wait() and write(*args)):
                trainer._save()
            trainer.advance(batches)  # which does not reach what is being saved
            go.set()
            trainer.checkpoints.wait()
            if ranks.is_main:
                torch.save(saved, folder / f"{shard}-{world_size}.partial")
                (folder / f"{shard}-{world_size}.partial").rename(folder / f"{shard}-{world_size}.pt")
        deadline = time.monotonic() + 2 * PATIENCE
        while len(list(folder.glob("*.pt"))) < len(SHARDS) * len(WORLDS):
            assert time.monotonic() < deadline, "a launch has not saved its states"
            time.sleep(0.1)
        compared, different = 0, []
        for (i, was), (j, by) in product(enumerate(SHARDS), enumerate(WORLDS)):
            shard = SHARDS[(i + j + WORLDS.index(world_size)) % 3]
            trainer = trainer_in(folder / f"{was}-{by}", ranks, f"runtime.shard={shard}")
            trainer._resume()
            saved, resumed = torch.load(folder / f"{was}-{by}.pt"), state(trainer)
            assert (trainer.step, trainer.data_state) == (2, {"samples": 16})
            assert saved.keys() == resumed.keys()
            compared += len(saved)
            different += [(was, by, shard, key) for key in saved if not torch.equal(saved[key], resumed[key])]
        return compared, different


def test_what_any_ranks_saved_any_ranks_resume_bit_for_bit(tmp_path):
    results = on_ranks(WORLDS, save_and_resume, tmp_path)
    for compared, different in chain.from_iterable(results.values()):
        assert compared > 9 * 100
        assert different == []
    for shard, world_size in product(SHARDS, WORLDS):
        weights = load_file(tmp_path / f"{shard}-{world_size}/checkpoints/step_00000002/hf/model.safetensors")
        saved = torch.load(tmp_path / f"{shard}-{world_size}.pt")
        assert weights.keys() == {key for key in saved if key.startswith("model.")}
        assert all(torch.equal(weights[key], saved[key]) for key in weights)


# ---- Muon: shared work, and a resume by fewer ranks

# Four ranks shard the 10 rows of keys as 3, 3, 3 and 1, and no shape has a multiple of four matrices.
MUON = ["optimizer.muon=true", "model.num_key_value_heads=1", "model.head_dim=10"]


def steps_of_muon(folder, ranks, shard, nodes):
    """The weights after two steps on given gradients, and how many elements this rank orthogonalized."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks.world_size // nodes)
    trainer = trainer_in(folder / f"{shard}-{ranks.world_size}", ranks, f"runtime.shard={shard}", *MUON)
    drawn, work = torch.Generator().manual_seed(0), []
    with patch.object(muon, "orthogonalized", lambda x, of=muon.orthogonalized: work.append(x.numel()) or of(x)):
        for _ in range(2):
            for parameter in trainer.optimizer.parameters.values():
                gradient = 1e-3 * torch.randn(parameter.shape, generator=drawn)  # too small to be clipped
                parameter.grad = sharding.shard_of(gradient, parameter)
            trainer.optimizer.step(1e-2)
    return wholes(trainer.optimizer.parameters), sum(work)


def steps_in_every_layout(rank, world_size, folder):
    with joined(folder / "store", rank, world_size) as ranks:
        return [steps_of_muon(folder, ranks, shard, nodes) for shard, nodes in (("none", 1), ("full", 1), ("full", 2))]


def test_ranks_share_muons_work_and_change_no_bit(tmp_path):
    with joined(tmp_path / "alone") as alone:
        weights, all_work = steps_of_muon(tmp_path, alone, "none", 1)
    layouts = zip(*on_ranks([4], steps_in_every_layout, tmp_path)[4], strict=True)
    for ranks_that_share, layout in zip((4, 4, 2), layouts, strict=True):
        assert all(torch.equal(updated[name], weights[name]) for updated, _ in layout for name in weights)
        assert sum(work for _, work in layout) == 4 // ranks_that_share * all_work
        assert max(work for _, work in layout) < 1.4 * all_work / ranks_that_share


def losses(trainer, steps):
    batches = trainer.data.batches(trainer.data_state)
    found = [trainer._reduce(*trainer.advance(batches), stop=False).read() for _ in range(steps)]
    return [(values.ce, values.grad_norm) for values in found]


def save_in_shards(rank, world_size, folder):
    with joined(folder / "store", rank, world_size) as ranks:
        os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
        trainer = trainer_in(folder / "run", ranks, "runtime.shard=optimizer", *MUON)
        trainer._resume()
        losses(trainer, 2)
        trainer._save()
        trainer.checkpoints.wait()
        tensors = [t for t in trainer.optimizer.state().values() if isinstance(t, DTensor)]
        return state(trainer), losses(trainer, 3), sum(t.to_local().numel() for t in tensors)


def test_one_rank_continues_a_run_of_muon_that_two_ranks_sharded(tmp_path):
    results = on_ranks([2], save_in_shards, tmp_path)[2]
    saved, expected, _ = results[0]
    with joined(tmp_path / "alone") as ranks:
        trainer = trainer_in(tmp_path / "run", ranks, "runtime.shard=none", *MUON)
        assert sum(kept for *_, kept in results) == moments(trainer.config.model, muon=True)
        trainer._resume()
        resumed = state(trainer)
        assert saved.keys() == resumed.keys()
        assert sum(name.endswith(".momentum") for name in saved) == 3 * 7
        assert all(torch.equal(saved[name], resumed[name]) for name in saved)
        # The ranks add gradients in another order; Muon rounds them to bfloat16, which moves the third loss more.
        for found, loss in zip(losses(trainer, 3), expected, strict=True):
            assert found == pytest.approx(loss, rel=1e-3)


def test_one_rank_shares_with_nobody_and_says_so(tmp_path, capsys):
    with joined(tmp_path / "store") as ranks:
        config = small_config("runtime.shard=full")
        model = sharding.decoder(config.model, config.sparsity.activation, config.runtime, ranks)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert "runtime.shard=full has no effect with one rank" in capsys.readouterr().err


def test_copies_begin_without_a_warning_of_torch(tmp_path, recwarn):
    with joined(tmp_path / "store") as ranks:
        config = small_config()
        model = sharding.decoder(config.model, config.sparsity.activation, config.runtime, ranks)
        copies = sharding.distributed(model, config.runtime, config.model.init_std, replace(ranks, world_size=2))
    assert isinstance(copies, DistributedDataParallel)
    assert not [each for each in recwarn if each.category is FutureWarning]
