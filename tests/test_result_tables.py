"""docs/results/README.md says where every table of numbers comes from; tables that have a file equal it."""

import json
import math
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import pytest
from PIL import Image

from scripts import width_grid
from scripts.benchmarks.bench_calibration import LAYERS, slower
from scripts.benchmarks.patterns import BASES
from scripts.benchmarks.shaped_models import DEFAULT_MEAN
from scripts.compare_runs import checksum, seconds, seconds_to
from sparsellm.config import ModelConfig
from sparsellm.config.architecture import parameters
from sparsellm.policy.report import NEAR

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/results"
DOCUMENTS = [ROOT / "README.md", ROOT / "docs/RESULTS.md", ROOT / "docs/INFERENCE.md"]
WITH, WITHOUT = "tables-with-a-file", "tables-without-a-file"
REPEATED, UNMEASURED = "tables-that-repeat-results", "tables-without-measurements-of-ours"
GIB, NEURONS = 2**30, 5_632
TRAINING_STEPS = ("0p5b", "1b", "1p5b", "2b", "1p5b_recorded")
PROVENANCE = {"machine", "date", "commit", "versions"}  # and the command or commands
TRANSCRIBED = "transcribed from LOG"  # "source" of a file that no benchmark wrote
PATTERNS = {  # of bench_ffn: how the tables call them
    "sparse": "sparse sample, recorded", "synthetic29": "synthetic", "layer1": "layer 1, recorded",
    "layer2": "layer 2, recorded", "layer4gate": "layer 4, its own input and weights", "layer4": "layer 4, recorded",
    "layer7": "layer 7, recorded", "synthetic300": "synthetic", "synthetic900": "synthetic",
    "synthetic2800": "synthetic",
}  # fmt: skip
FEW_TOKENS = ("sparse", "layer1", "layer4", "layer7")  # the patterns in tables of 1 to 1,024 tokens

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


def tables(path):
    """{"RESULTS.md#anchor", with " 2" for the second table of a section: the cells of its rows without the header}"""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    found, anchor, number = {}, "", 0
    for heading, block in re.findall(r"^#+ (.*)$|((?:^\|.*\n)+)", text, re.M):
        if heading:
            anchor, number = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"), 0
            continue
        number += 1
        lines = [line.strip("|").split("|") for line in block.splitlines()[2:]]
        name = f"{path.name}#{anchor}" + (f" {number}" if number > 1 else "")
        found[name] = [[cell.strip() for cell in line] for line in lines]
    return found


def listed(section):
    """{table: the second cell of its row} in a section of docs/results/README.md."""
    found = {}
    for link, second, *_ in tables(FOLDER / "README.md")[f"README.md#{section}"]:
        number, target = re.fullmatch(r"\[.*?(?:, table (\d))?\]\((?:\.\./)+(\w+\.md#[\w-]+)\)", link).groups()
        found[f"{target} {number}" if number else target] = second
    return found


TABLES = {name: rows for path in DOCUMENTS for name, rows in tables(path).items()}
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


class Cells(NamedTuple):
    """The numbers that a row of a table should have, from left to right, without its first cell. None: not compared."""

    numbers: list | None
    tolerance: float = 0  # relative, in addition to rounding
    label: str | None = None  # the first cell


def numbers(text):
    """(number, half a unit of its last digit) of each number in a cell; "H100" is none."""
    found = re.findall(r"(?<![A-Za-z\d.,])[-+]?\d+(?:,\d{3})*(?:\.\d+)?", text)
    return [(float(each.replace(",", "")), 0.5 * 10 ** -len(each.partition(".")[2])) for each in found]


def differences(rows, expected):
    """A line for each row whose numbers are not the expected ones, rounded."""
    assert len(rows) == len(expected)
    found = []
    for (label, *cells), (values, tolerance, name) in zip(rows, expected, strict=True):
        assert name in (None, label)
        shown = numbers(" | ".join(cells))
        if values is not None and not (
            len(shown) == len(values)
            and all(
                abs(number - value) <= half * (1 + 1e-6) + tolerance * abs(value)
                for (number, half), value in zip(shown, values, strict=True)
            )
        ):
            found.append(f"{label}: the table has {[number for number, _ in shown]}, the file {values}")
    return found


def file(name):
    return json.loads((FOLDER / name).read_text())


def runs_of(name):
    return {run["name"]: run for run in map(json.loads, (FOLDER / name).read_text().splitlines())}


def a_whole_run():
    torch, ours = (runs_of("0p5b_150m.jsonl")[name]["rows"] for name in ("torch", "kernels"))
    for first, last in ((5, 50), (100, 200), (200, 400), (400, 1145)):
        base, fast = (median(row["tokens_per_s"] for row in rows if first <= row["step"] <= last)
                      for rows in (torch, ours))  # fmt: skip
        yield Cells([base, fast, fast / base], 0.01)
    common = max(rows[-1]["val_ce"] for rows in (torch, ours))
    base, fast = seconds_to(torch, common), seconds_to(ours, common)
    yield Cells([base, fast, base / fast], 0.01)
    yield Cells(None)  # the whole command
    (dense, _), (first, sparse) = ((max(row["peak_memory_bytes"] for row in rows) / GIB,
                                    rows[-1]["peak_memory_bytes"] / GIB) for rows in (torch, ours))  # fmt: skip
    yield Cells([dense, first, sparse, first / dense, sparse / dense], 0.01)
    for value in (lambda row: row["val_ce"], lambda row: row["nnz_mean"], lambda row: sum(row["dead_per_layer"])):
        yield Cells([value(torch[-1]), value(ours[-1])])


def l1_relu_silu():
    runs = [run["rows"] for run in runs_of("0p5b_300m.jsonl").values()]
    losses = [{round(row["tokens"] / 1e6): row["val_ce"] for row in rows if row["val_ce"]} for rows in runs]
    for millions in ((52, 105, 157), (210, 262), (300,)):
        yield Cells([each[at] for each in losses for at in millions])
    *relu, silu = [rows[-1] for rows in runs]
    yield Cells([100 * (row["val_ce"] / silu["val_ce"] - 1) for row in relu])
    yield Cells([value for row in relu for value in (row["nnz_mean"], 100 * row["nnz_mean"] / NEURONS)])
    yield Cells([sum(row["dead_per_layer"]) for row in relu])
    yield Cells([value for rows in runs for value in (rows[-1]["tokens_per_s"] / 1e3, seconds(rows)[-1])], 0.01)
    common = max(rows[-1]["val_ce"] for rows in runs)
    yield Cells([seconds_to(rows, common) for rows in runs])
    (first, sparse), (relu_peak, _), (silu_peak, _) = (
        (max(row["peak_memory_bytes"] for row in rows) / GIB, rows[-1]["peak_memory_bytes"] / GIB) for rows in runs
    )
    yield Cells([first, sparse, relu_peak, silu_peak])
    yield Cells(None)  # the mean of seven tasks


def benchmarks_of_l1_relu_silu():
    found = file("0p5b_300m_benchmark.json")
    sides = [each["checkpoints"][0]["sides"] for each in found]

    def row(phase, unit):
        values = []
        for each in sides:
            base = each["PyTorch"][phase]
            if ours := each.get("kernels", {}).get(phase):
                energy = ours["mj_per_token"] / base["mj_per_token"]
                values += [ours["tokens_per_s"] / unit, ours["tokens_per_s"] / base["tokens_per_s"], energy]
            else:
                values.append(base["tokens_per_s"] / unit)
        return Cells(values)

    yield row("forward", 1e3)
    yield row("training", 1)
    (l1, l1_base), (relu, relu_base), (silu,) = ([side["training"]["peak_bytes"] for side in each.values()]
                                                 for each in sides)  # fmt: skip
    yield Cells([l1 / GIB, l1 / l1_base, relu / GIB, relu / relu_base, silu / GIB])
    yield row("prefill", 1e3)
    yield row("decode", 1)
    yield Cells(None)  # the whole command


def coefficients():
    runs = [run["rows"] for run in runs_of("0p5b_coefficients.jsonl").values()]
    at = [{round(row["tokens"] / 1e6): row for row in rows} for rows in runs]
    last = [rows[-1] for rows in runs]

    def dead(row):
        return sum(row["dead_per_layer"])

    yield Cells([each[millions]["val_ce"] for each in at for millions in (26, 52, 105)])
    yield Cells([row["val_ce"] for row in last])
    yield Cells([each[millions]["nnz_mean"] for each in at for millions in (3, 13, 26, 52)])
    yield Cells([value for row in last for value in (row["nnz_mean"], 100 * row["nnz_mean"] / NEURONS)])
    yield Cells([extreme(row["nnz_per_layer"]) for row in last for extreme in (min, max)])
    yield Cells([dead(each[millions]) for each in at for millions in (52, 79)])
    yield Cells([value for row in last for value in (dead(row), 100 * dead(row) / (8 * NEURONS))])


def trainers():
    def row(dense, sparse):
        values = [[each["tokens_per_s"], each["peak_bytes"] / GIB, each["mj_per_token"]] for each in (dense, sparse)]
        (speed, *others), (ours, *other_ours) = values
        pairs = [value for pair in zip(others, other_ours, strict=True) for value in pair]
        return Cells([dense["micro_batch"], speed, ours, ours / speed, *pairs])

    *not_compiled, dense, sparse = (
        file("transformers_trainer.json")["runs"] + file("transformers_trainer_compiled.json")["runs"]
    )
    yield row(*not_compiled[:2])
    yield row(*not_compiled[2:])
    yield row(dense, sparse)
    larger = file("transformers_trainer_16.json")["runs"]
    assert all(run["out_of_memory"] for run in larger)
    yield Cells([larger[0]["micro_batch"]])
    yield row(*file("training_step_1p5b.json")["runs"])


def forward_pass():
    for folder in ("benchmark_or_script", "forward_1p5b", "forward_1b"):
        (checkpoint,) = file(f"{folder}/benchmark.json")["checkpoints"]
        base, ours = (checkpoint["sides"][side]["forward"] for side in ("PyTorch", "kernels"))
        yield Cells([fmean(checkpoint["nonzeros"]), *forward_speeds(base, ours, energy=folder != "forward_1b")])
    for model in ("1b", "2b"):
        found = file("float8_1b_2b.json")[f"model {model}"]
        yield Cells([DEFAULT_MEAN, *forward_speeds(found["dense"], found["sparse"])])


def forward_speeds(base, ours, energy=True):
    """Tokens per ms of both, their ratio, and that of their energy."""
    speeds = [base["tokens_per_s"] / 1e3, ours["tokens_per_s"] / 1e3, ours["tokens_per_s"] / base["tokens_per_s"]]
    return [*speeds, *[ours["mj_per_token"] / base["mj_per_token"]] * energy]


def benchmark_and_script():
    (checkpoint,) = file("benchmark_or_script/benchmark.json")["checkpoints"]
    command = [checkpoint["sides"][side]["training"] for side in ("kernels", "PyTorch")]
    script = file("benchmark_or_script.json")["runs"][::-1]

    def values(of, unit=1):
        both = [[run[of] / unit for run in runs] for runs in (command, script)]
        return [*both[0], *both[1]], [100 * abs(a / b - 1) for a, b in zip(*both, strict=True)]

    yield Cells([fmean(checkpoint["nonzeros"]), fmean(script[0]["nonzeros"])])
    speeds, apart = values("tokens_per_s")
    yield Cells([*speeds, *apart])
    ratios = [speeds[0] / speeds[1], speeds[2] / speeds[3]]
    yield Cells([*ratios, 100 * abs(ratios[0] / ratios[1] - 1)])
    energies, apart = values("mj_per_token")
    yield Cells([*energies, *apart])
    yield Cells(values("peak_bytes", GIB)[0])


def fourteen_runs():
    runs = runs_of("mini.jsonl")
    relu = runs["relu"]["rows"][-1]["val_ce"]
    for names in (
        ("silu", "silu_seed_1"), ("relu",), ("l1_1e-5",), ("l1_2e-5",), ("l1_4e-5",), ("l1_8e-5", "l1_8e-5_seed_1"),
        ("l1_8e-5_redrawn",), ("l1_8e-5_blended",), ("l1_8e-5_warm_up",), ("l1_1.6e-4",), ("l1_3.2e-4",),
        ("l1_6.4e-4",),
    ):  # fmt: skip
        last = [runs[name]["rows"][-1] for name in names]
        sparse = [row for row in last if row["nnz_mean"] is not None]
        yield Cells([
            *(row["val_ce"] for row in last), *(100 * (row["val_ce"] / relu - 1) for row in last if names != ("relu",)),
            *(row["nnz_mean"] for row in sparse), *(100 * sum(row["dead_per_layer"]) / (8 * 1408) for row in sparse),
            *(100 * row["evaluation"]["mean"] for row in last), *(runs[name]["seconds"] for name in names),
        ])  # fmt: skip


def dense_to_sparse():
    runs = runs_of("dense_to_sparse.jsonl")
    silu = runs["silu"]["rows"][-1]["val_ce"]
    yield Cells([silu])
    for name in ("at_once", "at_once_taught", "gradual", "gradual_taught", "taught_3.2e-4", "taught_1.28e-3",
                 "taught_5.12e-3", "scratch"):  # fmt: skip
        last = runs[name]["rows"][-1]
        yield Cells([last["val_ce"], 100 * (last["val_ce"] / silu - 1), last["nnz_mean"]])


def tiny_dense_to_sparse():
    last = {name: run["rows"][-1] for name, run in runs_of("tiny_dense_to_sparse.jsonl").items() if name != "dense"}
    yield Cells([row["val_ce"] for row in last.values()])
    yield Cells([row["nnz_mean"] for name, row in last.items() if name != "silu"])


def widths():
    runs = file("mini_width.json")["runs"]
    silu = min((run for run in runs if run["activation"] == "silu"), key=lambda run: run["neurons"])
    for run in sorted(runs, key=lambda run: (run["activation"] == "relu", -run["l1_coefficient"], run["neurons"])):
        found = [run["neurons"], run["parameters"] / 1e6, run["held_out_ce"]]
        found += [run["held_out_ce"] - silu["held_out_ce"]] * (run is not silu)
        if run["activation"] == "relu":
            found += [run["nonzeros"], 100 * run["zeros"], 100 * run["dead"]]
        yield Cells([*found, run["ktokens_per_s_of_three_at_once"]])


def muon():
    runs = runs_of("mini_muon.jsonl")
    first = runs["silu_1408"]["rows"][-1]["val_ce"]
    for name in (
        "silu_1408", "silu_1408_lr1e-3", "silu_1408_lr4e-3", "silu_5632", "silu_5632_lr1e-3", "silu_11264",
        "relu_1408", "relu_2816", "relu_5632", "relu_11264",
        "l1_1408_2e-5", "l1_1408_4e-5", "l1_1408_8e-5", "l1_2816_2e-5", "l1_2816_4e-5", "l1_2816_8e-5", "l1_5632_2e-5",
        "l1_5632_4e-5", "l1_5632_6e-5", "l1_5632_6e-5_redrawn", "l1_5632_6e-5_blended", "l1_5632_6e-5_warm_up",
        "l1_5632_8e-5", "l1_11264_2e-5", "l1_11264_4e-5", "l1_11264_8e-5", "l1_5632_6e-5_lr1e-3", "l1_5632_6e-5_lr4e-3",
        "silu_1408_muon", "silu_1408_muon_lr1e-3", "silu_1408_muon_lr4e-3", "l1_1408_8e-5_muon4",
        "l1_5632_6e-5_muon4", "l1_5632_1.2e-4_muon4", "l1_5632_1.2e-4_muon4_t", "l1_5632_1.2e-4_muon2",
        "l1_5632_2.4e-4_muon4", "silu_1408_muon4_again", "silu_1408_muon8", "l1_5632_6e-5_muon8",
    ):  # fmt: skip
        config, last = runs[name]["config"], runs[name]["rows"][-1]
        width, nonzeros = config["model.intermediate_size"], last["nnz_mean"]
        found = [width, config["optimizer.learning_rate"], last["val_ce"]]
        found += [last["val_ce"] - first] * (name != "silu_1408")
        if nonzeros is not None:
            found += [nonzeros, 100 * (1 - nonzeros / width), 100 * sum(last["dead_per_layer"]) / (8 * width)]
        yield Cells(found)


def without_a_gate():
    gated, others = runs_of("mini_muon.jsonl"), runs_of("mini_ungated.jsonl")
    runs = [gated[f"l1_5632_{coefficient}"] for coefficient in ("2e-5", "4e-5", "8e-5")]
    runs += [
        others[f"ungated_{kind}_8448_{coefficient}"] for kind in ("relu", "sq") for coefficient in ("1.6e-5", "4e-5")
    ]
    for run in runs:
        width, last = run["config"]["model.intermediate_size"], run["rows"][-1]
        dead = sum(last["dead_per_layer"]) / (8 * width)
        yield Cells([width, last["val_ce"], last["nnz_mean"], 100 * (1 - last["nnz_mean"] / width), 100 * dead])


def a_run_on_four():
    rows = {row["step"]: row for row in file("scaling.json")["run-4"]["rows"]}
    for step in (1, 10, 14, 20, 26, 30, 35, 41):
        row = rows[step]
        yield Cells([
            row["tokens"] / 1e6, row["ce"], row["nnz_mean"], row["tokens_per_s"], 100 * row["mfu"],
            row["peak_memory_bytes"] / GIB,
        ])  # fmt: skip


def one_to_four():
    results, singles = file("scaling.json"), {}
    for gpus, firing in ((1, "36"), (2, "36"), (4, "36"), (1, "dense")):
        runs = results[f"1p5b-{gpus}-none-{firing}"]["runs"]
        rivals = {run["micro_batch"]: run["tokens_per_s"] for run in runs if run["variant"] == "runtime.kernels=torch"}
        for run in runs:
            speed, side = run["tokens_per_s"], (firing, run["variant"], run["micro_batch"])
            found = [*run["micro_batches"], speed]
            found += [speed / rivals[run["micro_batch"]]] * (run["variant"] == "runtime.kernels=auto")
            if gpus == 1:
                singles[side] = speed
            elif side in singles:
                found.append(speed / singles[side])
            nccl = [] if gpus == 1 else [100 * run["nccl"]]
            yield Cells([*found, 100 * run["mfu"], *nccl, run["peak_bytes"] / GIB, run["mj_per_token"]])


def law():
    lines = list(map(json.loads, (FOLDER / "mini_muon.jsonl").read_text().splitlines()))
    found = width_grid.grid(lines, [2e-5, 4e-5, 8e-5])
    columns = [each for pair in zip(found[2:], found.predicted(), strict=True) for each in pair]
    for i, width in enumerate(found.widths):
        for j in range(len(found.coefficients)):
            yield Cells([width, *(column[i, j] for column in columns)])


def law_of_tokens():
    short = runs_of("mini_muon.jsonl") | runs_of("mini_float8.jsonl")
    long = runs_of("mini_law_300m.jsonl")
    pairs = [(short[name], run) for name, run in long.items()]
    for seed in range(3):
        name = "l1_5632_6e-5" + f"_s{seed}" * bool(seed)
        pairs.append((short[name], runs_of("mini_wide_300m.jsonl")[f"l1_5632_s{seed}"]))
    for runs in pairs:
        width, coefficient = (
            {run["config"][key] for run in runs} for key in ("model.intermediate_size", "sparsity.l1_coefficient")
        )
        assert len(width) == len(coefficient) == 1
        before, after = (run["rows"][-1] for run in runs)
        found = [*width, before["val_ce"], after["val_ce"], after["val_ce"] - before["val_ce"]]
        for count in (lambda row: row["nnz_mean"], lambda row: fmean(row["nnz_per_layer"][1:])):
            found += [count(before), count(after), count(after) / count(before)]
        yield Cells(found)


def mini_in_float8():
    plain, found = runs_of("mini_muon.jsonl") | runs_of("mini_float8.jsonl"), runs_of("mini_float8.jsonl")
    changes = []
    for seed in range(3):
        name = "l1_5632_6e-5" + f"_s{seed}" * bool(seed)
        before, after = plain[name]["rows"][-1], found[f"l1_5632_6e-5_s{seed}_float8"]["rows"][-1]
        changes.append(after["val_ce"] - before["val_ce"])
        yield Cells([before["val_ce"], after["val_ce"], changes[-1], before["nnz_mean"], after["nnz_mean"]])
    yield Cells([fmean(changes)])


def wide_300m():
    runs = runs_of("mini_wide_300m.jsonl")
    for name in (
        "silu_1408_s0", "silu_1408_s1", "silu_1408_s2", "l1_5632_s0", "l1_5632_s1", "l1_5632_s2", "silu_1408_time_s0",
        "silu_1408_time_s1", "silu_1408_time_s2", "silu_5632_time_s0", "silu_5632_time_s1", "silu_5632_time_s2",
        "silu_5632_s0", "silu_1408_muon_s0", "l1_5632_1.5e-4_muon_s0",
    ):  # fmt: skip
        config, last = runs[name]["config"], runs[name]["rows"][-1]
        width, seed, nonzeros = config["model.intermediate_size"], config["training.seed"], last["nnz_mean"]
        base = f"silu_1408_s{seed}"
        found = [width, seed, last["tokens"] / 1e6, seconds(runs[name]["rows"])[-1], last["val_ce"]]
        found += [last["val_ce"] - runs[base]["rows"][-1]["val_ce"]] * (name != base)
        if nonzeros is not None:
            found += [nonzeros, 100 * (1 - nonzeros / width), 100 * sum(last["dead_per_layer"]) / (8 * width)]
        yield Cells(found)


def wide_at_0p5b():
    runs = runs_of("0p5b_wide_33m.jsonl")
    best = runs["silu_5632_5e-4"]["rows"][-1]["val_ce"]
    for name in (f"{kind}_{rate}" for kind in ("silu_5632", "l1_11264") for rate in ("5e-4", "1e-3", "2e-3")):
        config, rows = runs[name]["config"], runs[name]["rows"]
        last, width = rows[-1], config["model.intermediate_size"]
        size = parameters(ModelConfig(num_layers=8, intermediate_size=width)) / 1e6
        found = [width, size, config["optimizer.learning_rate"], last["val_ce"]]
        found += [last["val_ce"] - best] * (name != "silu_5632_5e-4")
        if last["nnz_mean"] is not None:
            dead = sum(last["dead_per_layer"]) / (8 * width)
            found += [last["nnz_mean"], 100 * (1 - last["nnz_mean"] / width), 100 * dead]
        yield Cells([*found, seconds(rows)[-1], max(row["peak_memory_bytes"] for row in rows) / GIB])


def loss_for_the_time(name, lengths=False):
    """A column per run; the first is the SiLU run that the others are compared with. With `lengths`, steps and tokens
    have a row."""
    runs = list(runs_of(name).values())
    rows = [run["rows"] for run in runs]
    last = [each[-1] for each in rows]
    widths = [run["config"]["model"]["intermediate_size"] for run in runs]
    (layers,) = {run["config"]["model"]["num_layers"] for run in runs}
    sizes = [parameters(ModelConfig(num_layers=layers, intermediate_size=width)) for width in widths]
    times = [seconds(each) for each in rows]
    sparse = [i for i, row in enumerate(last) if row["nnz_mean"] is not None]
    assert [run["config"]["sparsity"]["activation"] for run in runs].index("silu") == 0
    yield Cells([size / 1e6 for size in sizes])
    if lengths:
        yield Cells([value for row in last for value in (row["step"], row["tokens"] / 1e6)])
    yield Cells([row["val_ce"] for row in last])
    yield Cells([row["val_ce"] - last[0]["val_ce"] for row in last[1:]])
    yield Cells([last[i]["nnz_mean"] for i in sparse])
    yield Cells([100 * (1 - last[i]["nnz_mean"] / widths[i]) for i in sparse])
    yield Cells([100 * sum(last[i]["dead_per_layer"]) / (layers * widths[i]) for i in sparse])
    yield Cells([time[-1] for time in times])
    yield Cells([time[-1] / times[0][-1] for time in times[1:]])
    dense = [max((i for i, row in enumerate(each) if "dense" in row["plan_per_layer"]), default=-1) for each in rows]
    yield Cells([times[i][dense[i]] if dense[i] >= 0 else 0 for i in sparse])
    yield Cells([row["tokens_per_s"] for row in last])
    yield Cells([max(row["peak_memory_bytes"] for row in each) / GIB for each in rows])
    yield Cells([row["peak_memory_bytes"] / GIB for row in last])
    spans = [[now["tokens"] - before["tokens"] for before, now in pairwise(each)] for each in rows]
    energies = [
        sum(row["mj_per_token"] * tokens for row, tokens in zip(each[1:], span, strict=True)) / 1e6
        for each, span in zip(rows, spans, strict=True)
    ]
    yield Cells(energies)
    yield Cells([each / energies[0] for each in energies[1:]])
    yield Cells([14 * size / 1e9 for size in sizes])


def wide_steps():
    for name in ("wide_step_5632_dense.json", "wide_step_22528.json"):
        found = file(name)
        [run], width = found["runs"], int(re.search(r"intermediate_size=(\d+)", found["command"])[1])
        sparse = [fmean(run["nonzeros"])] * (run["engines"] is not None)
        yield Cells([width, run["tokens_per_s"], run["peak_bytes"] / GIB, *sparse, run["mj_per_token"]])


def float8_models():
    files = {f"{name} {size}": file(f"float8_{name}.json")[f"model {size}"] for name, size in (
        ("0p5b_1p5b", "0p5b"), ("1b_2b", "1b"), ("0p5b_1p5b", "1p5b"), ("1b_2b", "2b"), ("1p5b_inductor", "1p5b"),
    )}  # fmt: skip
    for found in files.values():
        speed, energy = ({name: row[key] for name, row in found.items()} for key in ("tokens_per_s", "mj_per_token"))
        dense, ours, rival = "dense", "sparse, FP8 attention and gate", "dense FP8"
        ratios = [speed[name] / speed[dense] for name in ("sparse", rival, "sparse, FP8 attention", ours)]
        energies = [energy[name] for name in (dense, rival, ours)]
        yield Cells([speed[dense] / 1e3, *ratios, speed[ours] / speed[rival], *energies, energy[ours] / energy[rival]])


def float8_layers():
    found = file("float8.json")
    for name in ("dense", "sparse", "dense FP8", "sparse, FP8 gate"):
        times = [found[f"layer {neurons}"]["ms"] for neurons in (5632, 11264)]
        values = [each["dense"] / each[name] for each in times if name != "dense"]
        yield Cells([*values, found["layer 5632"]["errors"][name]])


def float8_quality(name):
    for variant, row in file(name)["variants"].items():
        values = [row["cross_entropy"]]
        if variant != "bf16":
            values += [row["difference"], row["standard_error"]]
        values.append(row["nonzeros"])
        if variant != "bf16":
            values += [100 * row["differing_of_firing"], 100 * row["differing_of_all"]]
        yield Cells(values)


def generation(name, ours, *quantities):
    """A row per quantity, a column per number of sequences; a pair of models is the ratio of the first to the second.
    The last row: the share of memory bandwidth of the model `ours`."""
    found = {(row["model"], row["batch"]): row for row in file(name)["results"]}
    for key, *models in quantities:
        for model in models:
            above, *below = model if isinstance(model, tuple) else (model,)
            yield Cells([found[above, n][key] / math.prod(found[m, n][key] for m in below) for n in (1, 16, 64)])
    yield Cells([100 * found[ours, n]["of_peak"] for n in (1, 16, 64)])


def generation_in_float8():
    ours, rival = "accelerated, FP8", "accelerated"
    return generation(
        "generate_float8.json", ours, ("first_ms", rival, ours),
        ("each_ms", "dense", "dense, FP8", rival, ours, (rival, ours), ("dense, FP8", ours), ("dense", ours)),
        ("tokens_per_s", rival, ours, (ours, rival)), ("mj_per_token", (ours, rival)),
    )  # fmt: skip


def training_steps(*names, peaks=False):
    """A row per file of bench_train with PyTorch and the kernels."""
    for name in names:
        base, fast = file(name)["runs"]
        speeds = [base["tokens_per_s"], fast["tokens_per_s"], fast["ratio"]]
        gib = [run["peak_bytes"] / GIB for run in (base, fast) if peaks]
        yield Cells([fmean(fast["nonzeros"]), *speeds, *gib, fast["peak_ratio"], fast["mj_ratio"]])


def largest_micro_batches():
    for run in file("training_80gb_1p5b.json")["runs"]:
        speed = [run["tokens_per_s"], *[run["ratio"]] * (run["ratio"] != 1)]
        yield Cells([*run["micro_batches"], *speed, run["peak_bytes"] / GIB, run["mj_per_token"]])


def sharded():
    runs = file("sharded.json")["runs"]
    for run in runs:
        yield Cells([
            run["micro_batches"][1], run["tokens_per_s"], run["tokens_per_s"] / runs[0]["tokens_per_s"],
            100 * run["mfu"], run["peak_bytes"] / GIB, run["states_bytes"] / GIB, run["states_ratio"],
            run["mj_per_token"],
        ])  # fmt: skip


def training_with_float8():
    for width in (5632, 22528):
        (dense,) = file(f"training_float8_{width}_dense.json")["runs"]
        base, *others = file(f"training_float8_{width}.json")["runs"]
        for run in (dense, base, *others):
            ratios = [run["tokens_per_s"] / rival["tokens_per_s"] for rival in (dense, base)]
            shown = 0 if run is dense else 1 if run is base else 2
            yield Cells([
                run["tokens_per_s"], *ratios[:shown], run["peak_bytes"] / GIB, run["mj_per_token"],
            ])  # fmt: skip


def largest_micro_batches_in_float8():
    (dense,) = file("training_80gb_float8_dense.json")["runs"]
    base, ours = file("training_80gb_float8.json")["runs"]
    for run, rivals in ((dense, ()), (base, (dense,)), (ours, (dense, base))):
        ratios = [run["tokens_per_s"] / rival["tokens_per_s"] for rival in rivals]
        memory, energy = run["peak_bytes"] / GIB, run["mj_per_token"]
        yield Cells([*run["micro_batches"], run["tokens_per_s"], *ratios, memory, energy])


def speeds(name):
    first, *others = file(name)["runs"]
    yield Cells([first["tokens_per_s"], first["peak_bytes"] / GIB])
    for run in others:
        yield Cells([run["tokens_per_s"], run["tokens_per_s"] / first["tokens_per_s"], run["peak_bytes"] / GIB])


def first_steps():
    """A row per step of one run, whose number is the row's label."""
    (run,) = runs_of("1p5b_wide_start.jsonl").values()
    rows = {str(row["step"]): row for row in run["rows"]}
    for step in map(str, (1, 2, 8, 16, 24, 32)):
        row = rows[step]
        found = [row["tokens"] / 1e6, row["ce"], row["nnz_mean"], row["tokens_per_s"], row["micro_batch_size"]]
        energy = [] if row["mj_per_token"] is None else [row["mj_per_token"]]
        yield Cells([*found, row["peak_memory_bytes"] / GIB, *energy], label=step)


def text_generation():
    """A column per prompt length and number of sequences."""
    rows = file("generate_128.json")["results"] + file("generate_1984.json")["results"]
    assert {row["mode"] for row in rows} == {"ours"}
    cases = list(zip(rows[::2], rows[1::2], strict=True))  # dense, accelerated
    for key in ("first_ms", "each_ms"):
        for side in (0, 1):
            yield Cells([case[side][key] for case in cases])
    yield Cells([dense["each_ms"] / fast["each_ms"] for dense, fast in cases])
    yield Cells([fast["tokens_per_s"] / dense["tokens_per_s"] for dense, fast in cases])
    yield Cells([fast["mj_per_token"] / dense["mj_per_token"] for dense, fast in cases])
    yield Cells([100 * fast["of_peak"] for _, fast in cases])


def wide_text_generation():
    dense, ours = "dense", "accelerated"
    return generation(
        "generate_wide.json", ours, ("first_ms", dense, ours),
        ("each_ms", dense, ours, "accelerated, FP8", (dense, ours)),
        ("tokens_per_s", (ours, dense)), ("mj_per_token", (ours, dense)),
    )  # fmt: skip


def generate_of_transformers():
    """A row per mode; dense, accelerated and their ratio for each number of sequences and prompt length."""
    rows = [row for name in ("128", "1984") for row in file(f"generate_transformers_{name}.json")["results"]]
    speeds = {(row["mode"], row["context"], row["batch"], row["model"]): row["tokens_per_s"] for row in rows}
    cases = [(128, 1), (128, 16), (128, 64), (1984, 1), (1984, 16)]
    for mode in ("static", "eager"):
        pairs = [[speeds[mode, *case, model] for model in ("dense", "accelerated")] for case in cases]
        yield Cells([value for dense, fast in pairs for value in (dense, fast, fast / dense)])


def dense_training():
    for run in file("dense_training.json")["runs"]:
        _, micro_batch = run["micro_batches"]
        shares = [100 * run["mfu"], run["peak_bytes"] / GIB, 100 * run["data_wait"]]
        yield Cells([micro_batch, run["tokens_per_s"], run["ratio"], *shares])


def layers(name):
    """{(pattern, tokens): {variant: speedup, or time relative to cuBLAS's gate}} of a file of bench_ffn."""
    found = {}
    for result in file(name)["results"]:
        values = {row["variant"]: row.get("speedup") or row["of_gate"] for row in result["variants"]}
        values["dense ms"] = min(row["ms"] for row in result["variants"] if row["variant"] in BASES)
        found[result["pattern"], result["tokens"]] = values | {"nonzeros": result["nonzeros_per_token"]}
    return found


def one_layer(name, columns):
    """A row per number of tokens and pattern."""
    found = layers(name)
    for tokens in sorted({tokens for _, tokens in found}, reverse=True):
        for pattern, label in PATTERNS.items():
            yield Cells([tokens, *(found[pattern, tokens][column] for column in columns)], label=label)


def heavy_tokens():
    forward, training = layers("overflow_forward.json"), layers("overflow_training.json")
    overflows = {each["pattern"]: next(v["overflow_tiles"] for v in each["variants"] if v["variant"] == "tile")
                 for each in file("overflow_training.json")["results"]}  # fmt: skip
    for (pattern, tokens), at in forward.items():
        also = training[pattern, tokens]
        speedups = [each[engine] for each in (at, also) for engine in ("tile", "dense")]
        yield Cells([at["nonzeros"], overflows[pattern], *speedups], label=f"{pattern.removeprefix('heavy')}%")


def few_tokens(name):
    """A row per pattern, two numbers per number of tokens."""
    found = layers(name)
    for pattern in FEW_TOKENS:
        each = [found[pattern, tokens] for tokens in sorted({tokens for _, tokens in found})]
        yield Cells([value for at in each for value in (at["nonzeros"], at["row"])], label=PATTERNS[pattern])


def triton_kernels():
    forward, training = layers("triton_forward.json"), layers("triton_training.json")
    for pattern, label in PATTERNS.items():
        at = forward[pattern, 16_384], forward[pattern, 131_072], training[pattern, 16_384]
        yield Cells([at[0]["nonzeros"], *(each["tile"] for each in at)], label=label)


def engine_choice():
    found = file("calibration.json")["results"]
    for layer in LAYERS:
        cells = [cell for cell in found if cell["layer"] == layer]
        behind = [[slower(cell, policy) for cell in cells] for policy in ("calibrated", "packaged")]
        within = [value for each in behind for value in (sum(one <= NEAR for one in each), 100 * max(each))]
        yield Cells([len(cells), *within], label=layer.replace("x", " x "))


COMPARED = {
    "RESULTS.md#the-loss-for-the-time-05b-150m-tokens": partial(loss_for_the_time, "0p5b_wide_150m.jsonl"),
    "RESULTS.md#the-loss-for-the-time-05b-150m-tokens 2": partial(speeds, "0p5b_wide_speeds.json"),
    "RESULTS.md#the-loss-for-the-time-15b-twelve-minutes": partial(loss_for_the_time, "1p5b_short.jsonl", lengths=True),
    "RESULTS.md#the-loss-for-the-time-15b-twelve-minutes 2": partial(speeds, "1p5b_silu_speeds.json"),
    "RESULTS.md#the-first-nine-minutes-of-1p5b_wide": first_steps,
    "RESULTS.md#several-gpus-one-two-and-four-and-a-rank-that-is-killed": a_run_on_four,
    "RESULTS.md#several-gpus-one-two-and-four-and-a-rank-that-is-killed 2": one_to_four,
    "RESULTS.md#a-whole-training-run-05b-on-two-h100s": a_whole_run,
    "RESULTS.md#l1-compared-with-relu-and-silu-300m-tokens": l1_relu_silu,
    "RESULTS.md#l1-compared-with-relu-and-silu-300m-tokens 2": benchmarks_of_l1_relu_silu,
    "RESULTS.md#our-coefficient-and-the-papers": coefficients,
    "RESULTS.md#training-step-speed-and-memory":
        partial(training_steps, *(f"training_step_{name}.json" for name in TRAINING_STEPS), peaks=True),
    "RESULTS.md#the-trainer-of-transformers": trainers,
    "RESULTS.md#forward-pass-of-whole-models": forward_pass,
    "RESULTS.md#benchmark-compared-with-the-scripts": benchmark_and_script,
    "RESULTS.md#what-sparsity-costs-14-runs-of-a-30m-model": fourteen_runs,
    "RESULTS.md#making-a-dense-model-sparse": dense_to_sparse,
    "RESULTS.md#making-a-dense-model-sparse 2": tiny_dense_to_sparse,
    "RESULTS.md#wider-layers-a-first-screen-at-30m": widths,
    "RESULTS.md#wider-layers-learning-rates-and-muon": muon,
    "RESULTS.md#wider-layers-without-a-gate-and-squared-relu": without_a_gate,
    "RESULTS.md#wider-layers-a-law-of-width-coefficient-and-tokens": law,
    "RESULTS.md#wider-layers-a-law-of-width-coefficient-and-tokens 2": law_of_tokens,
    "RESULTS.md#wider-layers-at-05b-33m-tokens": wide_at_0p5b,
    "RESULTS.md#wider-layers-300m-tokens": wide_300m,
    "RESULTS.md#wider-layers-300m-tokens 2": wide_steps,
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss": float8_models,
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss 2": float8_layers,
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss 3": partial(float8_quality, "float8_quality.json"),
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss 4": partial(float8_quality, "float8_quality_0p5b.json"),
    "RESULTS.md#fp8-forward-passes-accuracy-and-loss 5": mini_in_float8,
    "RESULTS.md#text-generation-with-weights-in-fp8": generation_in_float8,
    "RESULTS.md#training-step-qwen3-8b-and-llama-3-8b-shapes":
        partial(training_steps, "training_step_qwen3_8b.json", "training_step_llama3_8b.json"),
    "RESULTS.md#dense-training-throughput-and-mfu": dense_training,
    "RESULTS.md#training-in-80-gb-the-largest-micro-batch": largest_micro_batches,
    "RESULTS.md#training-steps-with-fp8": largest_micro_batches_in_float8,
    "RESULTS.md#training-steps-with-fp8 2": training_with_float8,
    "RESULTS.md#sharded-training-fsdp2": sharded,
    "RESULTS.md#text-generation-tokens-per-second": text_generation,
    "RESULTS.md#text-generation-tokens-per-second 2": wide_text_generation,
    "RESULTS.md#generate-of-transformers": generate_of_transformers,
    "RESULTS.md#one-layer-forward-pass":
        partial(one_layer, "layer_forward.json", ("nonzeros", "dense ms", "gate_pack", "row", "tile", "dense")),
    "RESULTS.md#one-layer-forward-and-backward":
        partial(one_layer, "layer_training.json", ("nonzeros", "dense ms", "tile", "dense")),
    "RESULTS.md#heavy-tokens-what-overflow-costs": heavy_tokens,
    "RESULTS.md#one-layer-decoding": partial(few_tokens, "layer_decoding.json"),
    "RESULTS.md#small-batches-and-host-overhead": partial(few_tokens, "layer_small_batches.json"),
    "RESULTS.md#triton-kernels": triton_kernels,
    "RESULTS.md#engine-choice-by-calibration": engine_choice,
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


def test_a_picture_shows_the_rows_of_its_file():
    pictures = {
        re.match(r"\[([\w.]+)\]", cell)[1]: rest for cell, *rest in tables(FOLDER / "README.md")["README.md#figures"]
    }
    assert pictures.keys() == {path.name for path in (ROOT / "docs").glob("*.png")}
    for picture, (cell, left_out) in pictures.items():
        names = re.findall(r"\]\(([\w.]+)\)", cell)
        assert names, f"{picture} has no file"
        if picture != "gains.png":  # test_readme.py has its test
            if names[0].endswith(".jsonl"):
                out = left_out.split(", ")
                shown = {name: run["rows"] for name, run in runs_of(names[0]).items() if name not in out}
            else:
                shown = {name: file(name)["results"] for name in names}
            with Image.open(ROOT / "docs" / picture) as image:
                assert image.info["Source"] == checksum(shown), f"{picture} has other rows than {names[0]}"


def sections(text):
    """{anchor: the numbers in the tables of a section of RESULTS}"""
    found = {}
    for name, rows in tables(ROOT / "docs/RESULTS.md").items():
        anchor = name.partition("#")[2].partition(" ")[0]
        found.setdefault(anchor, set()).update(value for row in rows for cell in row for value, _ in numbers(cell))
    return found[text]


def test_the_workloads_of_the_readme_repeat_results():
    for row in TABLES["README.md#sparsellm"]:
        *_, gains, _, link = row
        anchors = re.findall(r"RESULTS\.md#([\w-]+)", gains + link)
        ratios = [float(each) for each in re.findall(r"(\d+\.\d+)x", gains)]
        assert ratios
        found = set().union(*(sections(anchor) | quotients(anchor) for anchor in anchors))
        assert set(ratios) <= found, f"{row[0]}: {ratios}, but RESULTS has others"


def quotients(anchor):
    """Gains that a table of RESULTS says in words: SiLU's time to L1's loss, divided by L1's."""
    if anchor != "l1-compared-with-relu-and-silu-300m-tokens":
        return set()
    (times,) = (row for row in TABLES[f"RESULTS.md#{anchor}"] if row[0].startswith("time in steps until"))
    l1, _, silu = (numbers(cell)[0][0] for cell in times[1:])
    return {round(silu / l1, 2)}


def test_the_speeds_of_the_experiments_in_the_readme_repeat_results():
    for name, *_, speed in TABLES["README.md#train"]:
        anchor = "sharded-training-fsdp2" if name == "`7b`" else "training-in-80-gb-the-largest-micro-batch"
        thousands, ratio = (float(each) for each in re.match(r"(\d+)k, ([\d.]+)x", speed).groups())
        measured = sections(anchor) if name != "`7b`" else {value / 2 for value in sections(anchor)}  # on two GPUs
        assert ratio in sections(anchor), name
        assert any(math.isclose(thousands, value / 1e3, abs_tol=0.5) for value in measured), name
