"""A run on several prepared corpora: what its rows, summary and figure show for each."""

import json
import random
from functools import partial

import pytest
import torch
from small_run import OVERRIDES, small_trainer
from whole_config import open_data, open_validation, prepare

from sparsellm.config import from_overrides
from sparsellm.data import tokenizer
from sparsellm.distributed.groups import process_group
from sparsellm.evaluation.perplexity import cross_entropy
from sparsellm.runs import folder as run_folder
from sparsellm.runs.layout import LOSS_PLOT
from sparsellm.runs.metrics import history
from sparsellm.training.loop import Trainer


@pytest.mark.slow
def test_a_run_validates_each_source_of_its_mix(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw, words = random.Random(0), ["gate", "the", "of", "layer", "7", "(x)"]
    texts = [f"{i} " + " ".join(draw.choices(words, k=30)) for i in range(300)]
    tokenizer.save(tokenizer.train(texts, 300), tmp_path / "tokenizer")
    sizes = [override for override in OVERRIDES if "vocab" not in override] + ["model.vocab_size=300"]
    for name, part in (("prose", texts[:100]), ("code", texts[100:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        files = ["data=files", f"data.name={name}", f"data.files=[{name}.jsonl]", "data.tokenizer=tokenizer"]
        prepare(from_overrides([*sizes, *files, "data.validation_fraction=0.2"]))
    mix = "data.mix=[{data: prose, weight: 0.75}, {data: code, weight: 0.25}]"
    config = from_overrides([*sizes, mix, "run.name=r", "logging.validation_samples=8", "runtime.data_workers=0"])
    with process_group("cpu") as ranks, run_folder.open_folder(config, ranks) as (config, folder):
        data = open_data(config, ranks)
        trainer = Trainer(config, ranks, data, folder)
        assert trainer.fit() == 0
        found = {
            name: cross_entropy(trainer.decoder, blocks, 8, trainer.autocast, ranks)
            for name, blocks in {**data.named_validation, None: data.validation}.items()
        }
        hf = run_folder.checkpoint(folder, 12) / "hf"
        assert (open_validation(config, hf, folder) == data.validation).all()
    rows = history(folder / "metrics.jsonl").rows
    assert len({*found.values()}) == 3
    for row in rows:
        each = {"prose": row["validation_ce/prose"], "code": row["validation_ce/code"], None: row["val_ce"]}
        assert (row["step"] in (4, 8, 12)) == (None not in each.values())
    assert each == pytest.approx(found)
    said = capsys.readouterr().out
    assert f"0.75 prose + 0.25 code: {data.training_tokens:,} training tokens until one of the sources repeats" in said
    assert f"held-out prose      {found['prose']:,.3f}\n" in said
    assert f"held-out code       {found['code']:,.3f}\n" in said
    assert (folder / "plots" / LOSS_PLOT).stat().st_size > 0
    damaged = rows[-1] | {"validation_ce/prose": "low"}
    (folder / "metrics.jsonl").write_text(json.dumps(damaged) + "\n")
    assert "its validation_ce/prose cannot be 'low'" in history(folder / "metrics.jsonl").problems[0]


def test_a_compiled_run_calls_its_layers_in_three_shapes_whatever_its_sources_are(tmp_path, monkeypatch):
    """Two with gradients, for a micro-batch of 3 does not divide the 8 sequences of a step, and one without; each with
    the gate between SiLU and ReLU and with the final one. Two of the loss."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    overrides = ["runtime.micro_batch_size=3", "sparsity.relu_tokens=256", "training.steps=2"]
    with small_trainer(tmp_path / "run", "runtime.compile=true", *overrides) as trainer:
        trainer.data.named_validation = {str(n): trainer.data.samples(range(n)) for n in range(1, 9)}
        batches = trainer.data.batches(None)
        for _ in range(2):
            trainer.advance(batches)
            found = trainer._validate()
    assert graphs["unique_graphs"] - before == 6 + 2
    assert found.named.keys() == {str(n) for n in range(1, 9)}
    torch._dynamo.reset()


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_what_fills_up_a_pass_counts_for_nothing(size, tmp_path):
    """Bit for bit what the blocks give without it where a pass is whole, and up to rounding where it is not."""
    with small_trainer(tmp_path / "run") as trainer, torch.no_grad():
        blocks, model = trainer.data.validation, trainer.decoder  # 5
        expected = sum(model(part[:, :-1], part[:, 1:]).ce.double() for part in blocks.split(size)).item() / (5 * 16)
        found = cross_entropy(model, blocks, size, trainer.autocast, trainer.ranks)
    assert found == (expected if 5 % size == 0 else pytest.approx(expected, rel=1e-6))
