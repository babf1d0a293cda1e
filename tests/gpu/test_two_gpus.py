"""Training as only two GPUs can test it: replicas and shards over NCCL, and the end of a rank when the other is killed.

Run as a script under torchrun, this file is a rank of the first test.
"""

import json
import os
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import psutil
import pytest
import torch
from processes import family, kill
from small_run import RandomTokens, small_config
from test_train import wait_for

from sparsellm.distributed.groups import process_group, whole
from sparsellm.runs.layout import STATE
from sparsellm.runs.metrics import METRICS, read
from sparsellm.training import muon
from sparsellm.training.loop import Trainer
from sparsellm.training.sharding import shard_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SHARDS = ("none", "optimizer", "full")
STEPS = 6
# 97 rows on two ranks make shards of different sizes; heads of 64 use flash attention.
SMALL = [
    "model.vocab_size=97", "model.hidden_size=128", "model.num_heads=2", "model.intermediate_size=256",
    "runtime.device=cuda", "runtime.precision=bfloat16", "runtime.compile=true", "runtime.micro_batch_size=2",
    "runtime.deterministic=false", f"training.steps={STEPS}", "sparsity.reinit_dead_after_tokens=1",
    "sparsity.reinit_every=2",
]  # fmt: skip


def wholes(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: whole(t).detach().cpu().clone() for name, t in trainer._tensors(trainer.silent.reduced()).items()}


def error_of_muon(trainer: Trainer) -> float:
    """How far a step of Muon that the ranks share is from one of a single GPU, relative to the step: the largest such
    error of all matrices."""
    drawn, moments = torch.Generator().manual_seed(0), trainer.optimizer.moments
    before = [whole(matrix).detach().clone() for matrix in moments]
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in before]
    for matrix, copy in zip(moments, alone, strict=True):
        copy.grad = torch.randn(copy.shape, generator=drawn).to(copy.device)
        matrix.grad = shard_of(copy.grad, matrix)
    settings = 1e-2, 0.1, torch.ones((), device="cuda"), torch.zeros((), dtype=torch.bool, device="cuda")
    muon.step({copy: torch.zeros_like(copy) for copy in alone}, *settings, None)
    muon.step(moments, *settings, trainer.optimizer.mesh)
    return max(
        ((whole(matrix) - copy).norm() / (copy - old).norm()).item()
        for matrix, copy, old in zip(moments, alone, before, strict=True)
    )


def in_every_shape(folder: Path) -> None:
    """Train and save with each way of sharding, and resume each saved run with each way."""
    found: dict = {"losses": {}, "drawn": {}, "resumed": []}
    states, drawn = {}, {}
    with process_group("cuda") as ranks:

        def trainer_of(shard: str, where: Path, *overrides: str) -> Trainer:
            torch._dynamo.reset()
            config = small_config(*SMALL, f"runtime.shard={shard}", *overrides)
            where.mkdir(parents=True, exist_ok=True)
            return Trainer(config, ranks, RandomTokens(config, ranks.rank, 2, where), where)

        for shard in SHARDS:
            trainer = trainer_of(shard, folder / shard)
            drawn[shard] = wholes(trainer)
            batches, losses = trainer.data.batches(None), []
            for _ in range(STEPS):
                sums, norm, clock = trainer.advance(batches)
                values = trainer._reduce(sums, norm, clock, False).read()
                losses.append([values.ce, values.grad_norm])
            states[shard], found["losses"][shard] = wholes(trainer), losses
            found["drawn"][shard] = all(torch.equal(t, drawn["none"][name]) for name, t in drawn[shard].items())
            trainer.checkpoints.find(skip_damaged=False)
            trainer.checkpoints.save(STEPS, trainer._tensors(trainer.silent.tokens), {"step": STEPS}, {}, {})
            trainer.checkpoints.wait()
        for saved, shard in product(SHARDS, SHARDS):
            trainer = trainer_of(shard, folder / saved)
            trainer.checkpoints.find(skip_damaged=False)
            trainer.checkpoints.load(STEPS, trainer._tensors(trainer.silent.tokens))
            resumed = wholes(trainer)
            different = [name for name, tensor in states[saved].items() if not torch.equal(tensor, resumed[name])]
            found["resumed"].append([saved, shard, different])
        found["muon"] = {shard: error_of_muon(trainer_of(shard, folder / "muon", "optimizer.muon=true"))
                         for shard in SHARDS}  # fmt: skip
        (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(found))


@pytest.mark.usefixtures("loaded_kernels")
def test_shards_over_nccl_train_as_copies_do_and_any_shape_resumes_any_other(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*TORCHRUN, __file__, str(tmp_path)], env=environment, check=True, timeout=400)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert all(found["drawn"].values())
        for shard in SHARDS[1:]:
            # The first cross entropy has the same weights and kernels.
            assert found["losses"][shard][0][0] == pytest.approx(found["losses"]["none"][0][0], rel=1e-6)
            # Later ones differ: attention's backward adds in any order, and the difference is rounded to bfloat16.
            for step, expected in zip(found["losses"][shard], found["losses"]["none"], strict=True):
                assert step == pytest.approx(expected, rel=2**-7)
        print(f"Muon, shared less alone, relative to a step: {found['muon']}")  # 0 if cuBLAS rounds alike
        assert all(error < 2**-5 for error in found["muon"].values())  # a matrix of another rank's would give 1
        assert len(found["resumed"]) == len(SHARDS) ** 2
        assert all(different == [] for _, _, different in found["resumed"]), found["resumed"]


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_rank_killed_over_nccl_ends_the_other_at_once_and_the_run_goes_on(shard, tmp_path):
    """NCCL itself would wait for an hour."""
    small = [
        "experiment=smoke", "model.hidden_size=128", "model.intermediate_size=256", "model.num_layers=2",
        "training.sequence_length=64", "training.steps=400", "logging=disabled", "logging.every=5",
        "run.checkpoint_every=20", "data.tokenizer_vocab_size=1000", "model.vocab_size=1000",
        "runtime.precision=bfloat16", "runtime.deterministic=false", f"runtime.shard={shard}", "run.name=killed",
    ]  # fmt: skip
    with (tmp_path / "said").open("wb") as said:
        command = [*TORCHRUN, "--max-restarts=1", "-m", "sparsellm.train", *small]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT)
        try:
            wait_for(tmp_path / "runs/killed/checkpoints/step_00000020" / STATE, process)
            ranks = [p for p in psutil.Process(process.pid).children() if "sparsellm.train" in p.cmdline()]
            victim, other = sorted(ranks, key=lambda rank: rank.environ()["RANK"], reverse=True)
            victim.kill()
            killed = time.monotonic()
            other.wait(60)
            seconds = time.monotonic() - killed
            assert process.wait(200) == 0
        finally:
            kill(family(process.pid))
            print((tmp_path / "said").read_text())
    text = (tmp_path / "said").read_text()
    print(f"the other rank ended after {seconds:.1f} s")
    gone = f"rank 1 (host {socket.gethostname()}, process {victim.pid}) died: it was killed"
    assert f"sparsellm: rank 0 exits: {gone}" in text
    assert "killed: resuming after step" in text
    assert read(tmp_path / "runs/killed" / METRICS)[-1]["step"] == 400
    assert (tmp_path / "runs/killed/checkpoints/step_00000400/COMMITTED").exists()


if __name__ == "__main__":
    in_every_shape(Path(sys.argv[1]))
