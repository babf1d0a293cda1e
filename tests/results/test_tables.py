"""docs/results/README.md says where every table of numbers comes from; tables that have a file equal it."""

import json
import re
from functools import partial

import pytest
from results import losses, speeds
from results.documents import FOLDER, ROOT, TABLES, Cells, differences, listed, runs_of, tables

WITH, WITHOUT = "tables-with-a-file", "tables-without-a-file"
REPEATED, UNMEASURED = "tables-that-repeat-results", "tables-without-measurements-of-ours"
PROVENANCE = {"machine", "date", "commit", "versions"}  # and the command or commands
TRANSCRIBED = "transcribed from LOG"  # "source" of a file that no benchmark wrote

# Tables whose numbers are in no file yet. Remove a table here once a benchmark has written its file. Never add one: a
# new table comes with its file.
WITHOUT_A_FILE = {
    "RESULTS.md#training-in-80-gb-the-largest-micro-batch 2",
    "RESULTS.md#sharded-training-fsdp2 2",
    "RESULTS.md#evaluation-speed-compared-with-lm-eval",
}
# Files from before benchmarks recorded their command, machine, date, commit and versions. Never add one.
WITHOUT_PROVENANCE = {
    "0p5b_150m.jsonl", "0p5b_300m.jsonl", "0p5b_300m_benchmark.json", "dense_to_sparse.jsonl", "mini.jsonl",
    "mini_width.jsonl",
}  # fmt: skip
RESULTS = (ROOT / "docs/RESULTS.md").read_text()


def test_every_table_is_in_one_list():
    names = [name for section in (WITH, WITHOUT, REPEATED, UNMEASURED) for name in listed(section)]
    assert sorted(names) == sorted(TABLES)


def test_fewer_and_fewer_tables_have_no_file():
    assert set(listed(WITHOUT)) == WITHOUT_A_FILE


def test_a_command_in_results_writes_the_file_that_a_table_lacks():
    for table, cell in listed(WITHOUT).items():
        for name in re.findall(r"`([^`]+)`", cell):
            path = re.escape(name.removesuffix("/benchmark.json"))
            assert re.search(rf"docs/results/{path}[\s`]", RESULTS), f"{table}: no command writes docs/results/{name}"
            assert not (FOLDER / name).exists(), f"{table}: {name} is there, so compare it with the table"


def test_every_file_says_how_it_was_made():
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.json*")}
    named = {name for cell in listed(WITH).values() for name in re.findall(r"\]\(([\w./]+)\)", cell)}
    assert files == named, "a file belongs to no table, or a table's file is missing"
    lacking = set()
    for name in files:
        text = (FOLDER / name).read_text()
        entries = [json.loads(line) for line in text.splitlines()] if name.endswith("l") else [json.loads(text)]
        made = [entry.get("saved_by", entry) if isinstance(entry, dict) else {} for entry in entries]
        if not all(
            each.get("source") == TRANSCRIBED or (each.keys() > PROVENANCE and each.keys() & {"command", "commands"})
            for each in made
        ):
            lacking.add(name)
    assert lacking == WITHOUT_PROVENANCE


COMPARED = {
    "RESULTS.md#the-loss-for-the-time-05b-150m-tokens": partial(losses.loss_for_the_time, "0p5b_wide_150m.jsonl"),
    "RESULTS.md#the-loss-for-the-time-05b-150m-tokens 2": partial(speeds.speeds, "0p5b_wide_speeds.json"),
    "RESULTS.md#the-loss-for-the-time-15b-twelve-minutes":
        partial(losses.loss_for_the_time, "1p5b_short.jsonl", lengths=True),
    "RESULTS.md#the-loss-for-the-time-15b-twelve-minutes 2": partial(speeds.speeds, "1p5b_silu_speeds.json"),
    "RESULTS.md#the-first-nine-minutes-of-1p5b_wide": losses.first_steps,
    "RESULTS.md#several-gpus-one-two-and-four-and-a-rank-that-is-killed": losses.a_run_on_four,
    "RESULTS.md#several-gpus-one-two-and-four-and-a-rank-that-is-killed 2": speeds.one_to_four,
    "RESULTS.md#a-whole-training-run-05b-on-two-h100s": losses.a_whole_run,
    "RESULTS.md#l1-compared-with-relu-and-silu-300m-tokens": losses.l1_relu_silu,
    "RESULTS.md#l1-compared-with-relu-and-silu-300m-tokens 2": losses.benchmarks_of_l1_relu_silu,
    "RESULTS.md#our-coefficient-and-the-papers": losses.coefficients,
    "RESULTS.md#training-step-speed-and-memory":
        partial(speeds.training_steps, *(f"training_step_{name}.json" for name in speeds.TRAINING_STEPS), peaks=True),
    "RESULTS.md#training-step-speed-and-memory 2":
        partial(speeds.training_steps, *(f"training_step_two_{n}.json" for n in (5632, 11264, 16384)), peaks=True),
    "RESULTS.md#the-trainer-of-transformers": speeds.trainers,
    "RESULTS.md#forward-pass-of-whole-models": speeds.forward_pass,
    "RESULTS.md#benchmark-compared-with-the-scripts": speeds.benchmark_and_script,
    "RESULTS.md#what-sparsity-costs-14-runs-of-a-30m-model": losses.fourteen_runs,
    "RESULTS.md#making-a-dense-model-sparse": losses.dense_to_sparse,
    "RESULTS.md#making-a-dense-model-sparse 2": losses.tiny_dense_to_sparse,
    "RESULTS.md#wider-layers-a-first-screen-at-30m": losses.widths,
    "RESULTS.md#wider-layers-learning-rates-and-muon": losses.muon,
    "RESULTS.md#wider-layers-without-a-gate-and-squared-relu": losses.without_a_gate,
    "RESULTS.md#wider-layers-a-law-of-width-coefficient-and-tokens": losses.law,
    "RESULTS.md#wider-layers-a-law-of-width-coefficient-and-tokens 2": losses.law_of_tokens,
    "RESULTS.md#wider-layers-at-05b-33m-tokens": losses.wide_at_0p5b,
    "RESULTS.md#wider-layers-300m-tokens": losses.wide_300m,
    "RESULTS.md#wider-layers-300m-tokens 2": speeds.wide_steps,
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss": speeds.float8_models,
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss 2": speeds.float8_layers,
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss 3": partial(losses.float8_quality, "float8_quality.json"),
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss 4": partial(losses.float8_quality, "float8_quality_0p5b.json"),
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss 5": losses.mini_in_float8,
    "RESULTS.md#text-generation-with-weights-in-fp8": speeds.generation_in_float8,
    "RESULTS.md#training-step-qwen3-8b-and-llama-3-8b-shapes":
        partial(speeds.training_steps, "training_step_qwen3_8b.json", "training_step_llama3_8b.json"),
    "RESULTS.md#dense-training-throughput-and-mfu": speeds.dense_training,
    "RESULTS.md#training-in-80-gb-the-largest-micro-batch": speeds.largest_micro_batches,
    "RESULTS.md#training-steps-with-fp8": speeds.largest_micro_batches_in_float8,
    "RESULTS.md#training-steps-with-fp8 2": speeds.training_with_float8,
    "RESULTS.md#sharded-training-fsdp2": speeds.sharded,
    "RESULTS.md#text-generation-tokens-per-second": speeds.text_generation,
    "RESULTS.md#text-generation-tokens-per-second 2": speeds.wide_text_generation,
    "RESULTS.md#generate-of-transformers": speeds.generate_of_transformers,
    "RESULTS.md#one-layer-forward-pass":
        partial(speeds.one_layer, "layer_forward.json", ("nonzeros", "dense ms", "gate_pack", "row", "tile", "dense")),
    "RESULTS.md#one-layer-forward-and-backward":
        partial(speeds.one_layer, "layer_training.json", ("nonzeros", "dense ms", "tile", "dense")),
    "RESULTS.md#one-layer-forward-and-backward 2": speeds.wide_layer,
    "RESULTS.md#heavy-tokens-what-overflow-costs": speeds.heavy_tokens,
    "RESULTS.md#one-layer-decoding": partial(speeds.few_tokens, "layer_decoding.json"),
    "RESULTS.md#small-batches-and-host-overhead": partial(speeds.few_tokens, "layer_small_batches.json"),
    "RESULTS.md#triton-kernels": speeds.triton_kernels,
    "RESULTS.md#engine-choice-by-calibration": speeds.engine_choice,
}  # fmt: skip


def test_every_table_with_a_file_is_compared():
    assert set(listed(WITH)) == set(COMPARED)


@pytest.mark.parametrize("name", COMPARED)
def test_a_table_equals_its_file(name):
    rows = TABLES[name]
    if name == "RESULTS.md#making-a-dense-model-sparse":
        rows = [row[:-1] for row in rows]  # the time per step is not in the file
    assert differences(rows, list(COMPARED[name]())) == []


def test_a_wrong_digit_is_found():
    rows = [["held out", "2.503, +0.9%", "1,234 (H100)"]]
    assert differences(rows, [Cells([2.5025, 0.85, 1234.4])]) == []
    for wrong in ([2.5036, 0.9, 1234], [2.503, 0.96, 1234], [2.503, 0.9, 1235], [2.503, 0.9]):
        assert differences(rows, [Cells(wrong)]) != []
    assert differences(rows, [Cells([2.52, 0.9, 1234], 0.01)]) == []


def test_nonzeros_in_the_guide_equal_the_files():
    ours, theirs = (run["rows"][-1]["nnz_mean"] for run in runs_of("0p5b_coefficients.jsonl").values())
    first, longer = (runs_of(name)[run]["rows"][-1]["nnz_mean"]
                     for name, run in (("0p5b_150m.jsonl", "kernels"), ("0p5b_300m.jsonl", "l1_2e-5")))  # fmt: skip
    for name, anchor, expected in (
        ("TRAINING.md", "the-l1-coefficient", [[first, ours], [longer]]),
        ("PAPER.md", "its-l1-coefficient", [[theirs], [ours], [first], [longer]]),
    ):
        rows = [row for row in tables(ROOT / "docs" / name)[f"{name}#{anchor}"] if {"150M", "300M"} & {*row}]
        assert differences([[name, row[-1]] for row in rows], [Cells(values) for values in expected]) == []
