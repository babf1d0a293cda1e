"""A run on several prepared corpora: what its rows, its summary and its picture say of each."""

import json
import random

import pytest
from small_run import OVERRIDES

from sparsellm.config import from_overrides
from sparsellm.data import open_data, open_validation, prepare, tokenizer
from sparsellm.distributed import process_group
from sparsellm.evaluation.perplexity import cross_entropy
from sparsellm.training import run_folder
from sparsellm.training.curves import LOSS
from sparsellm.training.loop import Trainer
from sparsellm.training.metrics import history


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
    assert f"0.75 prose + 0.25 code: {data.training_tokens:,} training tokens until one of them begins again" in said
    assert f"held-out prose      {found['prose']:,.3f}\n" in said
    assert f"held-out code       {found['code']:,.3f}\n" in said
    assert (folder / "plots" / LOSS).stat().st_size > 0
    damaged = rows[-1] | {"validation_ce/prose": "low"}
    (folder / "metrics.jsonl").write_text(json.dumps(damaged) + "\n")
    assert "its validation_ce/prose cannot be 'low'" in history(folder / "metrics.jsonl").problems[0]
