"""`python -m sparsellm.evaluate` and `evaluate_checkpoint` on a tiny trained run, on the CPU and without a network."""

import errno
import json
import math
import os
import random
import shutil
import socket
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import float8_stand_in
import lm_eval
import numpy as np
import pytest
import torch
import wandb
from evaluation.conftest import LAST
from evaluation.small_rows import write_rows
from lm_eval.tasks import TaskManager
from processes import torchrun
from transformers import AutoModelForCausalLM, AutoTokenizer
from wandb_server import dead_url

from sparsellm import api
from sparsellm.commands import evaluate
from sparsellm.config import (
    ConfigError,
    Device,
    Dtype,
    EvaluateConfig,
    Kernels,
    WandbMode,
    from_overrides,
    load,
    save,
    takes_kernels,
)
from sparsellm.distributed.groups import process_group
from sparsellm.evaluation import checkpoint, downstream, perplexity, record, request, results, tasks
from sparsellm.evaluation.checkpoint import evaluate_checkpoint
from sparsellm.hf import conversion, hub
from sparsellm.inference import accelerate
from sparsellm.model import Decoder
from sparsellm.ops import float8 as float8_linears
from sparsellm.runs.checkpoint import Checkpoints
from sparsellm.runs.metrics import METRICS, read
from sparsellm.runs.wandb_record import WandbRun
from sparsellm.system import provenance

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "eval"


@pytest.fixture
def no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"asked the network for {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: refuse(None, args))


@pytest.fixture
def one_thread():
    """As each of several ranks has: with more, sums may be cut in other ways."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def samples(folder: Path, task: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"samples_{task}.jsonl").read_text().splitlines()]


def test_seven_tasks_and_the_held_out_split_without_a_network(run, rows, no_network):
    found = evaluate_checkpoint(EvaluateConfig(checkpoint=str(run), data_dir=str(rows)))
    assert found == json.loads((run / LAST / "evaluation/results.json").read_text())
    assert list(found["tasks"]) == list(tasks.TASKS)
    assert found["failed"] == {}
    assert (found["checkpoint"], found["step"], found["dtype"]) == (str(run / LAST), 4, "bfloat16")
    for name, task in found["tasks"].items():
        has_norm = name not in ("winogrande", "commonsense_qa")
        assert task["metric"] == ("acc_norm" if has_norm else "acc")
        assert (task["score"], task["stderr"]) == (task[task["metric"]], task[f"{task['metric']}_stderr"])
        assert (task["acc_norm"] is not None) == has_norm
        assert results.settings(task) == {
            "dtype": "bfloat16", "kernels": "torch", "device": checkpoint.device_type("auto"), "data": str(rows),
            "limit": None, "lm_eval": lm_eval.__version__,
        }  # fmt: skip
        of_rows = [sample["acc"] for sample in samples(run / LAST / "evaluation", name)]
        assert (task["rows"], task["acc"]) == (6, sum(of_rows) / 6)
        assert task["split"] == ("test" if name == "arc_challenge" else "validation")
        stands_in = name in ("arc_easy", "openbookqa")
        assert task["note"] == ("no test rows in data_dir: scored validation instead" if stands_in else None)
    for mean, key in (("mean", "score"), ("mean_acc", "acc")):
        assert found[mean] == pytest.approx(sum(task[key] for task in found["tasks"].values()) / 7)
    assert found["mean_acc"] != found["mean"]
    assert found["validation"]["loss"] == pytest.approx(read(run / METRICS)[-1]["val_ce"], rel=1e-6)
    assert found["validation"]["perplexity"] == math.exp(found["validation"]["loss"])
    assert found["validation"]["tokens"] == 6 * 32

    # The evaluation inside the checkpoint does not make it look damaged to a resume.
    with process_group("cpu") as ranks:
        assert Checkpoints(run / "checkpoints", ranks, 2, lambda *_: None).find(skip_damaged=False) == 4


@pytest.mark.parametrize("dtype", [Dtype.auto, pytest.param(Dtype.float32, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_the_scores_are_those_of_plain_lm_eval(run, rows, tmp_path, no_network, dtype):
    """The `hf` model of lm-eval as its command line makes it, on the same rows: every log-probability is the same, in
    the dtype that both take by themselves, bfloat16, and in float32."""
    config = EvaluateConfig(str(run), data_dir=str(rows), batch_size=4, output_dir=str(tmp_path / "out"), dtype=dtype)
    found = evaluate_checkpoint(config)
    assert found["dtype"] == ("bfloat16" if dtype == Dtype.auto else "float32")
    typed = "" if dtype == Dtype.auto else f",dtype={dtype.name}"
    for name, task in found["tasks"].items():
        stock, split = Path(lm_eval.tasks.__file__).parent / tasks.TASKS[name].path, task["split"]
        rows_of_task = {"data_files": {split: str(rows / name / f"{split}.jsonl")}}
        definition = tmp_path / f"{name}.yaml"
        definition.write_text(json.dumps({
            "include": str(stock), "task": name, "dataset_path": "json", "dataset_name": None, "training_split": None,
            "validation_split": None, "test_split": split, "dataset_kwargs": rows_of_task,
        }))  # fmt: skip
        with hub.offline(True):
            theirs = lm_eval.simple_evaluate(
                model="hf", model_args=f"pretrained={run / LAST / 'hf'}{typed}", device="cpu", batch_size=4,
                tasks=[str(definition)], task_manager=TaskManager(include_defaults=False),
            )  # fmt: skip
        for key in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr"):
            assert task[key] == theirs["results"][name].get(f"{key},none"), (name, key)
        answers = [sample["filtered_resps"] for sample in samples(tmp_path / "out", name)]
        assert answers == json.loads(json.dumps([sample["filtered_resps"] for sample in theirs["samples"][name]])), name


@pytest.mark.slow
def test_two_ranks_score_like_one(run, rows, tmp_path, one_thread):
    """And on screen, piped, stands the table, once, with a line per task by the name that lm-eval knows."""
    rows = shutil.copytree(rows, tmp_path / "rows")
    write_rows(rows, "piqa", "validation", count=1)  # of which one rank has none
    options = ["batch_size=5", "tasks=[hellaswag,arc_easy,piqa,commonsense_qa]", "device=cpu"]
    options += [f"checkpoint={run}", f"data_dir={rows}"]
    done = torchrun(2, "-m", "sparsellm.evaluate", *options, "output_dir=two", folder=tmp_path)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["arc_easy", "hellaswag", "piqa", "commonsense_qa"]
    assert lines[5].startswith("mean of 4")
    assert lines[-1] == "two/results.json"

    one = evaluate_checkpoint(from_overrides([*options, f"output_dir={tmp_path}/one"], EvaluateConfig))
    two = json.loads((tmp_path / "two/results.json").read_text())
    assert (one["tasks"], one["mean"]) == (two["tasks"], two["mean"])
    assert one["validation"]["loss"] == pytest.approx(two["validation"]["loss"], rel=1e-6)
    for name in one["tasks"]:
        assert samples(tmp_path / "one", name) == samples(tmp_path / "two", name)  # every bit of every log-probability


def test_scoring_draws_no_random_numbers(bare, rows):
    """So it can run in the middle of training."""
    with process_group("cpu") as ranks, hub.offline(True):
        model = AutoModelForCausalLM.from_pretrained(bare)
        lm = downstream.SharedLM(model, AutoTokenizer.from_pretrained(bare), ranks, "auto")
        loaded = tasks.load("hellaswag", str(rows))
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        result, _ = downstream.score(lm, loaded, limit=None)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert result["rows"] == 6
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_package_that_is_not_installed_has_no_version(bare, rows, monkeypatch):
    """`python -m sparsellm.evaluate` in a clone without `pip install`: the scores are not lost for it."""
    installed = provenance.version

    def version(package):
        if package == "sparsellm":
            raise PackageNotFoundError(package)
        return installed(package)

    monkeypatch.setattr(provenance, "version", version)
    found = evaluate_checkpoint(EvaluateConfig(checkpoint=str(bare), data_dir=str(rows), tasks=["piqa"]))
    assert found == json.loads((bare / "evaluation/results.json").read_text())
    measured = found["tasks"]["piqa"]["measured"]
    assert measured["sparsellm"] is None
    for name in ("lm_eval", "torch", "transformers", "datasets"):
        assert measured[name] == installed(name)


@pytest.mark.parametrize(
    ("kernels", "machine", "compared"),
    [("auto", "cuda", "cuda"), ("auto", "triton", "triton"), ("triton", "cuda", "triton")],
)
def test_a_comparison_uses_the_kernels_that_are_asked_for_or_those_of_the_machine(
    kernels, machine, compared, run, monkeypatch
):
    monkeypatch.setattr(request.backend, "of_this_machine", lambda: machine)
    config = EvaluateConfig(checkpoint=str(run), compare_kernels=True, kernels=Kernels[kernels])
    assert list(request.Request.of(config).sides.values()) == [Kernels[compared], Kernels.torch]


def test_a_task_that_fails_leaves_the_others(bare, rows, tmp_path, capsys):
    local = shutil.copytree(rows, tmp_path / "rows")
    shutil.rmtree(local / "piqa")
    second = json.dumps({"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"})
    with (local / "winogrande/validation.jsonl").open("a") as file:
        file.write(second + "\n")
    names = ["piqa", "winogrande", "arc_challenge"]
    found = evaluate_checkpoint(EvaluateConfig(checkpoint=str(bare), data_dir=str(local), tasks=names))
    assert list(found["tasks"]) == ["arc_challenge"]
    said = capsys.readouterr().err
    assert said.count(f"{bare} has no COMMITTED file") == 1
    assert "it should have validation.jsonl" in found["failed"]["piqa"]
    assert "piqa  failed\n" in said  # the table says why
    assert "it should have validation.jsonl" not in said
    assert "row 7: sentence is 'no gap': it should be a text with a gap, _" in found["failed"]["winogrande"]
    assert (found["mean"], found["validation"], found["step"]) == (None, None, None)


def test_a_tokenizer_without_a_token_to_begin_with_is_named(bare, rows):
    """lm-eval, given the same folder, ends in a TypeError of the tokenizer."""
    (bare / "tokenizer_config.json").unlink()
    with pytest.raises(checkpoint.EvaluationError, match="has neither a bos_token nor an eos_token") as found:
        evaluate_checkpoint(EvaluateConfig(checkpoint=str(bare), data_dir=str(rows), tasks=["piqa"]))
    assert 'in tokenizer_config.json ("eos_token": "TOKEN")' in str(found.value)


def test_a_limit_leaves_the_held_out_loss_that_of_the_run(run, rows):
    found = evaluate_checkpoint(EvaluateConfig(checkpoint=str(run), data_dir=str(rows), tasks=["piqa"], limit=2))
    assert found["validation"]["tokens"] == 6 * 32  # all of logging.validation_samples
    assert found["validation"]["loss"] == pytest.approx(read(run / METRICS)[-1]["val_ce"], rel=1e-6)
    assert "over 192 held-out tokens" in results.table(found, ["piqa"])


def test_float8_is_scored_and_stored_apart(run, rows, monkeypatch):
    float8_stand_in.install(monkeypatch)
    monkeypatch.setattr(request, "evaluate_mistakes", lambda _: [])
    asked = []

    def in_float8(model, *settings, float8):
        asked.append((type(model).__name__, *settings, float8))
        for name, module in model.named_modules():
            if name.endswith("self_attn"):
                float8_linears.quantize_linears(module)

    def evaluated(**settings):
        return evaluate_checkpoint(EvaluateConfig(str(run), ["piqa"], str(rows), **settings))

    base = run / LAST / "evaluation"
    monkeypatch.setattr(checkpoint, "accelerate", in_float8)
    found = evaluated(float8=True)
    assert asked == [("LlamaForCausalLM", "auto", "tile", True), ("Decoder", "auto", "tile", True)]
    assert found == json.loads((base / "float8/results.json").read_text())
    assert not (base / "results.json").exists()
    assert (found["float8"], found["dtype"], found["validation"]["precision"]) == (True, "float8", "float8")
    assert (found["tasks"]["piqa"]["measured"]["dtype"], found["tasks"]["piqa"]["measured"]["kernels"]) == (
        "float8",
        "cuda",
    )
    assert checkpoint.is_complete(EvaluateConfig(str(run), ["piqa"], str(rows), float8=True))
    written = (base / "float8/results.json").read_bytes()
    exact = evaluated()
    assert exact == json.loads((base / "results.json").read_text())
    assert "float8" not in exact
    assert exact["dtype"] == "bfloat16"
    assert 0 < abs(exact["validation"]["loss"] - found["validation"]["loss"]) < 0.1
    assert (base / "float8/results.json").read_bytes() == written
    assert results.of_dtype(base, "float8") == base / "float8"
    limited = evaluated(float8=True, limit=2, validation=False)
    assert limited["output_dir"] == str(base / "limit_2/float8")
    with pytest.raises(checkpoint.EvaluationError, match=r"float32 .*, and float8=true computes bfloat16 models: add"):
        evaluated(float8=True, dtype=Dtype.float32)
    monkeypatch.setattr(checkpoint, "accelerate", accelerate.accelerate)
    with pytest.raises(checkpoint.EvaluationError, match=r"FP8 does not compute .*: "):
        evaluated(float8=True, limit=1)


def test_rounding_the_linear_modules_changes_no_bit_of_a_loss_under_autocast(run):
    config, activation, weights = conversion.load(run / LAST / "hf")
    decoder = Decoder(config, activation).eval()
    decoder.load_state_dict(weights)
    tokens = torch.randint(config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(0))
    with process_group("cpu") as ranks:
        given = 2, torch.autocast("cpu", torch.bfloat16), ranks
        before = perplexity.cross_entropy(decoder, tokens, *given)
        perplexity.round_linears(decoder)
        assert decoder.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
        assert perplexity.cross_entropy(decoder, tokens, *given) == before


def test_limit_and_requests_beyond_the_context(bare, tmp_path):
    long = {"goal": "water stone bird " * 80, "sol1": "tree", "sol2": "fish", "label": 0}
    (tmp_path / "rows/piqa").mkdir(parents=True)
    (tmp_path / "rows/piqa/validation.jsonl").write_text((json.dumps(long) + "\n") * 3)
    found = evaluate_checkpoint(
        EvaluateConfig(checkpoint=str(bare), data_dir=str(tmp_path / "rows"), tasks=["piqa"], limit=2)
    )
    assert found["tasks"]["piqa"]["rows"] == 2
    assert found["tasks"]["piqa"]["note"] == "4 requests truncated on the left, to the context of 192 tokens"


def test_without_its_tokens_a_run_has_scores_but_no_validation(run, rows):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.partition("\n")[2].replace("/tokens", "/gone"))  # without its checksum
    found = evaluate_checkpoint(EvaluateConfig(checkpoint=str(run), data_dir=str(rows), tasks=["piqa"]))
    assert "the prepared tokens of " in found["failed"]["validation"]
    assert found["mean"] == found["tasks"]["piqa"]["score"]
    without = EvaluateConfig(checkpoint=str(run), data_dir=str(rows), tasks=["piqa"], validation=False)
    assert evaluate_checkpoint(without)["failed"] == {}


def test_without_tasks_the_held_out_text_alone_is_evaluated(run, bare, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint.tasks, "load", lambda *_: pytest.fail("rows are read"))
    monkeypatch.setattr(checkpoint.hub, "answers", lambda what: pytest.fail(f"{what}: asked for on the hub"))
    assert evaluate.main([f"checkpoint={run}", "tasks=none", "device=cpu"], "evaluate") == 0
    assert "validation" in (shown := capsys.readouterr().out)
    assert "mean of" not in shown
    found = api.evaluate(run, tasks=["none"], device="cpu")
    assert (found["tasks"], found["failed"]) == ({}, {})
    assert checkpoint.is_complete(EvaluateConfig(str(run), ["none"]))
    assert evaluate.main([f"checkpoint={bare}", "tasks=none", "device=cpu"], "evaluate") == 1
    assert "no held-out text" in capsys.readouterr().out


def test_without_tasks_and_held_out_text_there_is_nothing_to_evaluate(run):
    for config, start in [
        (EvaluateConfig(str(run), ["none"], validation=False), "nothing to evaluate: "),
        (EvaluateConfig(tasks=["none"], export="x"), "nothing to export: "),
        (EvaluateConfig(str(run), ["none", "piqa"]), "tasks is none, piqa: it should be none alone"),
    ]:
        assert [mistake.startswith(start) for mistake in checkpoint.mistakes(config)] == [True]


def test_the_held_out_loss_asks_for_the_kernels_of_this_scoring(run, rows, monkeypatch):
    """On a GPU, the kernels compute the loss if the run and the options of the evaluation allow them."""
    asked = []
    monkeypatch.setattr(checkpoint, "takes_kernels", lambda *about: asked.append(about))
    evaluate_checkpoint(EvaluateConfig(str(run), ["piqa"], str(rows), kernels=Kernels.torch))
    ((runtime, activation, device),) = asked
    assert (runtime.kernels, runtime.precision.name, activation.name) == (Kernels.torch, "bfloat16", "relu")
    assert not takes_kernels(runtime, activation, "cuda")
    on_a_gpu = replace(runtime, kernels=Kernels.auto, device=Device.auto, deterministic=False)
    assert takes_kernels(on_a_gpu, activation, "cuda")
    assert device == checkpoint.device_type("auto")


def test_kernels_and_pytorch_side_by_side(run, rows, monkeypatch):
    """Where no kernel runs, their PyTorch reference takes their place: what is tested is who computes which side."""
    monkeypatch.setattr(request, "evaluate_mistakes", lambda _: [])
    computed = []

    def reference(model, kernels):
        computed.append(kernels)
        return accelerate.accelerate(model, "torch")

    monkeypatch.setattr(checkpoint, "accelerate", reference)
    monkeypatch.setattr(checkpoint.backend, "loaded", lambda: computed[-1])
    config = EvaluateConfig(
        checkpoint=str(run), data_dir=str(rows), tasks=["piqa", "hellaswag"], dtype=Dtype.bfloat16, compare_kernels=True
    )
    found = evaluate_checkpoint(config)
    assert computed == ["cuda"]
    for side, kernels in ((found, "cuda"), (found["torch"], "torch")):
        of = [(task["measured"]["kernels"], task["measured"]["dtype"]) for task in side["tasks"].values()]
        assert of == [(kernels, "bfloat16")] * 2
    assert list(found["torch"]) == ["tasks", "validation", "mean", "mean_acc"]
    for name in config.tasks:
        kernels, dense = (samples(run / LAST / "evaluation" / side, name) for side in ("", "torch"))
        pairs = zip(kernels, dense, strict=True)
        gaps = [
            abs(a[0] - b[0]) for k, t in pairs for a, b in zip(k["filtered_resps"], t["filtered_resps"], strict=True)
        ]
        assert max(gaps) < 1  # nats; of sums of bfloat16's roundings over up to 20 tokens with logits of up to 16
    # An unsupported dtype is refused if kernels are required, and reported if not.
    stored = replace(config, tasks=["piqa"], dtype=Dtype.float32)
    with pytest.raises(checkpoint.EvaluationError, match=r"the weights are torch\.float32: add dtype=bfloat16"):
        evaluate_checkpoint(stored)


def test_every_mistake_at_once(rows):
    config = from_overrides(["tasks=[piqa,pica,piqa]", "limit=0", "batch_size=0", "data_dir=gone"], EvaluateConfig)
    found = checkpoint.mistakes(config)
    for start in (
        "checkpoint has no value",
        "limit is 0",
        "batch_size is 0",
        "tasks has pica",
        "tasks has duplicates",
    ):
        assert any(mistake.startswith(start) for mistake in found), start
    assert len(found) == 6
    with pytest.raises(ConfigError, match="limit is 0"):
        evaluate_checkpoint(config)
    compare = EvaluateConfig(compare_kernels=True, kernels=Kernels.torch, dtype=Dtype.float32)
    found = checkpoint.mistakes(compare)[1:]
    assert [mistake[:40] for mistake in found] == [
        "compare_kernels=true, but dtype=float32 ", "compare_kernels=true, but kernels=torch ",
    ]  # fmt: skip


def test_scores_reach_the_run_record(monkeypatch):
    """A resumed record refuses rows before its last one, so they come after it, with their own step beside them."""

    class Record:
        step, summary = 401, {}

        def define_metric(self, name, step_metric):
            self.metric = name, step_metric

        def log(self, row, step):
            self.logged = row, step

    wandb = WandbRun.__new__(WandbRun)
    wandb._run = record = Record()
    tasks = {"piqa": {"score": 0.5, "stderr": 0.01, "metric": "acc_norm", "rows": 7, "acc": 0.4, "split": "validation"}}
    wandb.evaluation(400, {"evaluation/mean": 0.5}, "evaluation/table", tasks)
    row, step = record.logged
    table = row.pop("evaluation/table")
    assert (row, step) == ({"evaluation/step": 400, "evaluation/mean": 0.5}, 401)
    assert table.columns == ["task", "score", "stderr", "metric", "rows"]
    assert table.data == [["piqa", 0.5, 0.01, "acc_norm", 7]]
    assert record.metric == ("evaluation/*", "evaluation/step")
    assert record.summary == {"evaluation/mean": 0.5}


@pytest.mark.parametrize(
    ("of_the_run", "mode", "recorded"),
    [("online", "offline", "offline"), ("offline", "online", "offline"), ("disabled", "online", "disabled")],
)
def test_the_environment_asks_for_no_more_of_a_record_than_the_run_did(monkeypatch, of_the_run, mode, recorded):
    modes = []

    def record_of(config, _folder):
        modes.append(config.logging.wandb.name)
        raise OSError("no record here")

    run = SimpleNamespace(run=Path("runs/r"))
    monkeypatch.setattr(record, "locate", lambda _checkpoint: run)
    monkeypatch.setattr(record.run_folder, "claim", lambda _run: nullcontext())
    monkeypatch.setattr(record, "load", lambda _path: from_overrides([f"logging={of_the_run}"]))
    monkeypatch.setattr(record, "WandbRun", record_of)
    monkeypatch.setenv("WANDB_MODE", mode)
    record.record({"checkpoint": "r"})
    assert modes == [recorded]


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")
def test_real_rows_of_all_seven(bare):
    found = evaluate_checkpoint(EvaluateConfig(checkpoint=str(bare), data_dir=str(SHARED), limit=3))
    assert [task["rows"] for task in found["tasks"].values()] == [3] * 7


@pytest.mark.slow
def test_scores_are_written_where_the_records_server_is_not_there(run, rows, monkeypatch, capsys):
    """With the real wandb, which ends its command after some 100 s and before the scores were written."""
    config = load(run / "config.yaml")
    save(replace(config, logging=replace(config.logging, wandb=WandbMode.online)), run / "config.yaml")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    wandb.teardown()
    settings = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": dead_url(), "WANDB_INIT_TIMEOUT": "2"}
    for name, value in (settings | {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}).items():
        monkeypatch.setenv(name, value)
    arguments = [f"checkpoint={run}", f"data_dir={rows}", "tasks=[piqa]", "device=cpu"]
    assert evaluate.main(arguments, "evaluate") == 0
    shown = capsys.readouterr()
    results_json = run / LAST / "evaluation/results.json"
    assert json.loads(results_json.read_text())["tasks"].keys() == {"piqa"}
    assert str(results_json) in shown.out
    assert "Weights & Biases: offline: online failed: CommError" in shown.err
    assert f"sync {run}/wandb" in shown.err
    (record,) = (run / "wandb").glob("*run-*/*.wandb")
    assert b"evaluation/piqa" in record.read_bytes()


@pytest.mark.parametrize(("loss", "shown"), [(1000.0, "perplexity over 1e308"), (math.nan, "failed: the loss is nan")])
def test_a_held_out_loss_without_a_perplexity_takes_no_score_away(run, rows, monkeypatch, capsys, loss, shown):
    monkeypatch.setattr(checkpoint, "cross_entropy", lambda *_: loss)
    code = evaluate.main([f"checkpoint={run}", f"data_dir={rows}", "tasks=[piqa]", "device=cpu"], "evaluate")
    assert code == (0 if math.isfinite(loss) else 1)
    assert shown in capsys.readouterr().out

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    written = json.loads((run / LAST / "evaluation/results.json").read_text(), parse_constant=refuse)
    assert written["tasks"].keys() == {"piqa"}
    assert "evaluation/validation_perplexity" not in results.scores(written)


def test_a_full_disk_at_the_end_of_an_evaluation_is_a_sentence_below_the_scores(bare, rows, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_whole", full)
    assert evaluate.main([f"checkpoint={bare}", f"data_dir={rows}", "tasks=[piqa]", "device=cpu"], "evaluate") == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].startswith("piqa")
    assert "results.json cannot be written: [Errno 28] No space left on device" in shown.err
