"""The rows of tables about runs: losses, nonzeros and times, computed from docs/results. A function per table."""

import json
from itertools import pairwise
from statistics import fmean, median

from results.documents import FOLDER, GIB, NEURONS, Cells, file, runs_of

from scripts import width_grid
from scripts.compare_runs import seconds, seconds_to
from sparsellm.config import ModelConfig
from sparsellm.config.architecture import parameters


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


def first_steps():
    """A row per step of one run, whose number is the row's label."""
    (run,) = runs_of("1p5b_wide_start.jsonl").values()
    rows = {str(row["step"]): row for row in run["rows"]}
    for step in map(str, (1, 2, 8, 16, 24, 32)):
        row = rows[step]
        found = [row["tokens"] / 1e6, row["ce"], row["nnz_mean"], row["tokens_per_s"], row["micro_batch_size"]]
        energy = [] if row["mj_per_token"] is None else [row["mj_per_token"]]
        yield Cells([*found, row["peak_memory_bytes"] / GIB, *energy], label=step)


def float8_quality(name):
    for variant, row in file(name)["variants"].items():
        values = [row["cross_entropy"]]
        if variant != "bf16":
            values += [row["difference"], row["standard_error"]]
        values.append(row["nonzeros"])
        if variant != "bf16":
            values += [100 * row["differing_of_firing"], 100 * row["differing_of_all"]]
        yield Cells(values)
