"""The notebook in examples/ runs from top to bottom, and is stored without outputs. The script for the Trainer of
transformers trains on two ranks and resumes. The layer trains in torchtitan's Llama, where torchtitan is installed."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import PATIENCE, SERVER

import sparsellm

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "tiny.ipynb"


def code_cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs():
    assert [cell["outputs"] for cell in code_cells()] == [[] for _ in code_cells()]


@pytest.mark.slow
def test_the_notebook_trains_draws_and_writes(tmp_path):
    script = tmp_path / "cells.py"
    cells = "\n".join("".join(cell["source"]) for cell in code_cells())
    assert cells.count("training.steps=100") == 1
    script.write_text(cells.replace("training.steps=100", "training.steps=12"))  # it only trains longer
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/notebook/metrics.jsonl").is_file()
    assert "Return the" in done.stdout


def trained(rank, folder, port):
    """The L1 terms of a run of four steps, and its weights; and the weights of the run resumed after step 2."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    l1_loss, l1 = sparsellm.l1_loss, []
    sparsellm.l1_loss = lambda model: l1.append(l1_loss(model)) or l1[-1]
    sys.path.append(str(EXAMPLES))
    example = importlib.import_module("transformers_trainer")
    example.STEPS, example.L1_COEFFICIENT = 4, 10
    example.SIZES = dict.fromkeys(example.SIZES, 2) | {"hidden_size": 16, "intermediate_size": 48}
    straight = example.main(folder / "text", folder / "output").state_dict()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / "output/checkpoint-4")
    dist.barrier()
    resumed = example.main(folder / "text", folder / "output").state_dict()
    weights = [{name: weight.numpy() for name, weight in state.items()} for state in (straight, resumed)]
    dist.destroy_process_group()
    return [each.item() for each in l1], *weights


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_sparsely_on_two_ranks_and_resumes(tmp_path):
    (tmp_path / "text").write_bytes(bytes(i * i // 7 % 256 for i in range(65 * 256)))  # 65 blocks, all different
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # the ranks connect to this store, as under torchrun
    with ProcessPoolExecutor(2, SERVER) as pool:
        tasks = [pool.submit(trained, rank, tmp_path, store.port) for rank in range(2)]
        (l1, straight, resumed), (l1_of_other, *others) = (task.result(3 * PATIENCE) for task in tasks)
    assert len(l1) == 2 * (4 + 2)  # two micro-batches a step
    assert l1[7] < 0.9 * l1[0]
    assert l1[0] != l1_of_other[0]  # each rank trains on samples of its own
    for state in (resumed, *others):
        for name, weight in straight.items():
            assert (weight == state[name]).all(), name


def test_the_llama_of_torchtitan_trains_sparsely_and_keeps_its_hugging_face_names(monkeypatch):
    attention = pytest.importorskip("torchtitan.models.common.attention")
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("torchtitan_llama3")
    assert example.sparse_1b().override.imports == ["torchtitan_llama3.sparse_feedforward"]
    model_config = example.model_registry("debugmodel").model
    model_config.layers = model_config.layers[:1]
    layer = model_config.layers[0]
    layer.feed_forward = example.sparse_feedforward(layer.feed_forward)
    layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()  # a CPU has no other one
    with torch.device("meta"):  # as torchtitan's trainer does
        model = model_config.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    optimizer, losses = torch.optim.AdamW(model.parameters(), 2e-3), []
    for _ in range(6):
        logits = model(torch.arange(32)[None] % 8)
        losses.append(torch.nn.functional.cross_entropy(logits[0, :-1], torch.arange(1, 32) % 8))
        (losses[-1] + 1e-4 * sparsellm.l1_loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.2 * losses[0]
    state = model.state_dict()
    weights = example.StateDictAdapter(model_config, None).to_hf(state)
    feedforward = {name.split(".")[-2]: weight for name, weight in weights.items() if ".mlp." in name}
    assert feedforward.keys() == set(example.PROJECTIONS)
    assert feedforward["up_proj"] is state["layers.0.feed_forward.up_proj.weight"]
