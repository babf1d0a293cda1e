"""The model card of a checkpoint: facts from the run's rows up to its step, and commands that reproduce the run."""

import json
import random
import shlex
import subprocess

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard
from small_run import small_config, small_trainer

from sparsellm.config import definition, from_overrides, quoted
from sparsellm.hf import card
from sparsellm.runs import folder as run_folder
from sparsellm.runs.locate import locate
from sparsellm.runs.metrics import IN_EVERY_ROW, METRICS, MetricsFile, read


def row(step, **values):
    return {"step": step, "ce": 5.0, "val_ce": None, "evaluation": None, "nnz_per_layer": [3.0, 4.5],
            "nnz_mean": 3.75, **values}  # fmt: skip


def test_a_saved_checkpoint_has_a_card_of_the_rows_up_to_its_step(tmp_path):
    with small_trainer(tmp_path / "run", "run.checkpoint_every=8") as trainer:
        assert trainer.fit() == 0
    rows = {row["step"]: row for row in read(tmp_path / "run" / METRICS)}
    for step, told, validated in ((8, 8, 4), (12, 12, 12)):  # step 8 was saved before it was validated
        folder = run_folder.checkpoint(tmp_path / "run", step)
        locate(str(folder)).identity()  # verifies the checksums of hf/
        text = (folder / "hf/README.md").read_text()
        assert f"step {step}\n" in text
        assert f"| cross entropy, held-out | {rows[validated]['val_ce']:.3f} (step {validated}) |" in text
        each = ", ".join(f"{nonzeros:,.1f}" for nonzeros in rows[told]["nnz_per_layer"])
        assert f"by layer {each} |" in text
        assert "README.md" in "".join(json.loads((folder / "COMMITTED").read_text())["files"])
        known = [row | {"val_ce": None} if step == row["step"] == 8 else row for row in rows.values()]
        assert text == card.text(trainer.config, step, known)


def test_later_rows_and_rows_that_are_not_there_change_nothing():
    config = small_config()
    rows = [row(3, val_ce=4.0, evaluation={"mean": 0.5, "piqa": 0.5, "sciq": None}), row(6)]
    text = card.text(config, 6, rows)
    assert card.text(config, 6, [*rows, row(9, ce=1.0, val_ce=1.0)]) == text
    assert "| cross entropy, held-out | 4.000 (step 3) |" in text
    assert "| scores at step 3 | mean 0.5000, piqa 0.5000 |" in text
    assert "| nonzeros per token | 3.8 of 48; by layer 3.0, 4.5 |" in text
    assert "| tokens | 768 of 1,536 |" in text
    without = card.text(config, 6, [])
    assert "cross entropy" not in without
    for each in (text, without):
        head = yaml.safe_load(each.split("---\n", 2)[1])
        index = head.pop("model-index", None)
        assert head == {
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            "tags": ["sparsellm", "sparse-activations"],
        }
        assert each.count("FILL IN") == 2
        assert (index is None) == (each is without)
    assert ModelCard(text).data.eval_results == [EvalResult("text-generation", "piqa", "piqa", "acc", 0.5)]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=0p5b"],
        ["experiment=smoke", "training.steps=5", "sparsity=dense_silu"],
        ["experiment=smoke", "data=files", "data.files=[a b.txt,c/*.jsonl]", "data.tokenizer=owner/name"],
        ["experiment=7b", "model.gated=false", "optimizer.warmup_steps=0"],
        ["experiment=0p5b", "data.mix=[{data: web, weight: 0.7}, {data: code, weight: 3}]"],
        ["experiment=0p5b", "data=fineweb_edu_stream"],
        ["training.steps=80", f"optimizer.warmup_steps={from_overrides([]).optimizer.warmup_steps}"],  # not capped
    ],
    ids=" ".join,
)
def test_its_commands_give_the_same_run(overrides):
    config = from_overrides(overrides)
    commands = [shlex.split(command) for command in card.commands_of(config)]
    mixed_or_streamed = bool(config.data.mix) or config.data.streaming
    assert [command[:2] for command in commands] == [
        ["sparsellm", name] for name in (["train"] if mixed_or_streamed else ["prepare_data", "train"])
    ]
    for _, _, *typed in commands:
        assert definition(from_overrides(typed)) == definition(config)


def test_its_preparation_makes_as_many_tokens_as_the_run_found():
    """More may have been prepared than a run asks for, and their number decides the order in which they are read."""
    given = ["experiment=smoke", "data=files", "data.files=[a.txt]", "training.steps=5"]
    for more in ([], ["data.max_tokens=9000"]):
        prepare, train = (shlex.split(command) for command in card.commands_of(from_overrides([*given, *more]), 20_000))
        assert [each for each in prepare if each.startswith("data.max_tokens")] == ["data.max_tokens=20000"]
        assert [each for each in train if each.startswith("data.max_tokens")] == more
    prepare, _ = card.commands_of(from_overrides(["experiment=smoke"]), 20_000)
    assert "data.max_tokens" not in prepare  # the embedded corpus is prepared completely


def test_a_checkpoints_card_counts_the_tokens_that_the_run_found(tmp_path):
    files = ["data=files", "data.files=[a.txt]", "training.steps=2"]
    with small_trainer(tmp_path / "run", *files) as trainer:
        trainer.data.training_tokens = 20_000
        assert trainer.fit() == 0
    text = (run_folder.checkpoint(tmp_path / "run", 2) / "hf/README.md").read_text()
    assert "data.max_tokens=20000" in next(line for line in text.splitlines() if "prepare_data" in line)


def test_its_commands_name_no_folders_of_the_machine():
    private = ["data.files=[/home/me/corpus/*.parquet]", "data.tokenizer=~/me/words", "distill.teacher=/home/me/dense"]
    for command in card.commands_of(from_overrides(["experiment=smoke", "data=files", *private, "init_from=/home/me"])):
        typed = shlex.split(command)
        assert "data.files=['FOLDER/*.parquet']" in typed
        assert {"data.tokenizer=FOLDER/words", "distill.teacher=FOLDER/dense", "init_from=FOLDER/me"} <= set(typed)
        assert "home" not in command


def test_it_names_the_models_that_its_weights_come_from():
    assert "initial weights" not in card.text(small_config(), 6, [row(6)])
    given = ["init_from=/home/me/base", "distill.teacher=owner/name", "distill.weight=0.5", "sparsity.relu_tokens=700"]
    text = card.text(small_config(*given), 6, [row(6)])
    for line in (
        "| initial weights | FOLDER/base, whose licence applies too |", "| gate | from SiLU to ReLU over 700 tokens |",
        "| teacher | owner/name, weight 0.5 |",
    ):  # fmt: skip
        assert line in text


def test_it_says_of_which_gate_its_numbers_are_until_the_gate_is_a_relu():
    config = small_config(f"sparsity.relu_tokens={8 * small_config().training.tokens_per_step}")
    assert "measured with this step's gate, 75% ReLU, not with the" in card.text(config, 6, [row(6)])
    assert "| gate | from SiLU to ReLU over 1,024 tokens |" in card.text(config, 8, [row(8)])


def test_a_licence_goes_into_the_head_and_in_place_of_what_the_text_leaves_open():
    text = card.text(small_config(), 6, [row(6, evaluation={"piqa": 0.5, "mean": 0.5})])
    assert card.licence(text) is None
    filled = card.licensed(text, "mit")
    assert card.licence(filled) == "mit"
    assert "FILL IN" not in filled
    assert filled.endswith("## Licence\n\nmit, for the weights. Data and tokenizer have licences of their own.\n")
    body, before = filled.split("---\n", 2)[2], text.split("---\n", 2)[2]
    assert body.split("## Licence")[0] == before.split("## Licence")[0]
    _, head, _ = text.split("---\n", 2)
    assert yaml.safe_load(filled.split("---\n", 2)[1]) == {**yaml.safe_load(head), "license": "mit"}
    more = filled.replace("mit, for", "FILL IN: one\nfor") + "\n## More\n"
    assert card.licensed(more, "mit") == filled + "\n## More\n"
    assert r"a\1, for the weights." in card.licensed(text, r"a\1")
    own = "---\nlicense: other  # ours\n---\n# Mine\n"
    assert card.licensed(own, "other") == own
    with pytest.raises(ValueError, match="its YAML header cannot be read as a model card's"):
        card.licence("---\n- a\n---\n")


def test_names_of_a_card_are_one_cell_of_text_each():
    hostile = "a|b\n\n<img src=x onerror=alert(1)> [c](http://d) `e` *f*"
    text = card.text(small_config("data=files", f"data.name={quoted(hostile)}", f"init_from={quoted(hostile)}"), 6, [])
    cell = r"a\|b &lt;img src=x onerror=alert(1)&gt; \[c\](http://d) \`e\` \*f\*"
    assert f"| data | {cell} |" in text.splitlines()
    assert f"| initial weights | '{cell}', whose licence applies too |" in text.splitlines()
    for line in text.splitlines():
        assert "<img" not in line or line.startswith("    ")  # a code block shows it literally


def test_a_command_is_on_one_line_and_the_shell_reads_what_was_meant():
    hostile = "a\nb\t'c\\ \u2028d"
    for command in card.commands_of(from_overrides(["experiment=smoke", "data=files", f"data.name={quoted(hostile)}"])):
        assert len(command.splitlines()) == 1
        given = subprocess.run(
            ["bash", "-c", command.replace("sparsellm", "printf '%s\\0'", 1)], capture_output=True, check=True,
            env={"LC_ALL": "C.UTF-8"},
        ).stdout.decode().split("\0")  # fmt: skip
        assert from_overrides([each for each in given if "=" in each]).data.name == hostile


@pytest.mark.parametrize(
    ("value", "public"),
    [
        ("/home/me/x", "FOLDER/x"), ("~/x", "FOLDER/x"), ("../me/x", "FOLDER/x"), ("a/../../me/x", "FOLDER/x"),
        ("file:///home/me/x", "FOLDER/x"), ("owner/name", "owner/name"), ("c/*.jsonl", "c/*.jsonl"),
        ("https://me:p@ss@host/a/x.jsonl?token=1#2", "https://host/a/x.jsonl"),
        ("hf://datasets/owner/name@main/x.parquet", "hf://datasets/owner/name@main/x.parquet"),
        ("zip://*.jsonl::https://t@host/x.zip?token=1", "zip://*.jsonl::https://host/x.zip"),
        ("zip://*.jsonl::/home/me/x.zip", "zip://*.jsonl::FOLDER/x.zip"),
        ([{"data": "/home/me/web", "weight": 1}, None, 3], [{"data": "FOLDER/web", "weight": 1}, None, 3]),
    ],
)  # fmt: skip
def test_what_belongs_to_this_machine_or_its_user_is_left_out(value, public):
    assert card.without_folders(value) == public
    assert card.without_folders(public) == public


def test_the_few_rows_that_a_run_keeps_for_its_cards_give_the_cards_of_all_rows(tmp_path):
    draw, config = random.Random(1), small_config()
    rows: list[dict] = []
    file = MetricsFile(tmp_path / METRICS, last_step=0)
    for step in range(1, 40):
        validated, scored = draw.random() < 0.2, draw.random() < 0.2
        values = dict.fromkeys(IN_EVERY_ROW) | {"tokens": step, "skipped_steps": 0}
        values |= {"tokens_per_s": 1.0, "l1_coefficient": 0.0}
        scores = {"mean": draw.random(), "piqa": None} if scored else None
        rows.append(values | row(step, ce=draw.random(), val_ce=draw.random() * validated or None, evaluation=scores))
        file.write(rows[-1])
        if step == 20:  # a resume
            file.close()
            file = MetricsFile(tmp_path / METRICS, last_step=20, saved=file.saved())
        assert len(file.telling) <= 3
        assert card.text(config, step, file.telling) == card.text(config, step, rows)
