"""The rows of tables about speed, memory and energy, computed from docs/results. A function per table."""

import math
import re
from statistics import fmean

from results.documents import GIB, Cells, file

from scripts.benchmarks.bench_calibration import LAYERS, slower
from scripts.benchmarks.patterns import BASES
from scripts.benchmarks.shaped_models import DEFAULT_MEAN
from sparsellm.policy.report import NEAR

TRAINING_STEPS = ("0p5b", "1b", "1p5b", "2b", "1p5b_recorded")
PATTERNS = {  # of bench_ffn: how the tables call them
    "sparse": "sparse sample, recorded", "synthetic29": "synthetic", "layer1": "layer 1, recorded",
    "layer2": "layer 2, recorded", "layer4gate": "layer 4, its own input and weights", "layer4": "layer 4, recorded",
    "layer7": "layer 7, recorded", "synthetic300": "synthetic", "synthetic900": "synthetic",
    "synthetic2800": "synthetic",
}  # fmt: skip
FEW_TOKENS = ("sparse", "layer1", "layer4", "layer7")  # the patterns in tables of 1 to 1,024 tokens


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
    for gpu, name in (("H100", "training_80gb_1p5b.json"), ("H200", "training_80gb_1p5b_h200.json")):
        for run, path in zip(file(name)["runs"], ("PyTorch", "kernels, sparse"), strict=True):
            speed = [run["tokens_per_s"], *[run["ratio"]] * (run["ratio"] != 1)]
            memory = run["peak_bytes"] / GIB
            yield Cells([*run["micro_batches"], *speed, memory, run["mj_per_token"]], label=f"{gpu}, {path}")


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


def wide_layer():
    """A row per number of neurons, from two files of the same layers."""
    files = (file(f"layer_wide_{name}.json")["results"] for name in ("forward", "training"))
    for forward, training in zip(*files, strict=True):
        assert all(forward[key] == training[key] for key in ("tokens", "neurons", "pattern", "nonzeros_per_token"))
        first, second = ({row["variant"]: row for row in each["variants"]} for each in (forward, training))
        cells = [forward["nonzeros_per_token"]]
        for each, names in ((first, ("torch compiled", "gate_pack", "tile")), (second, ("torch compiled", "tile"))):
            cells += [*(each[name]["ms"] for name in names), each["tile"]["speedup"]]
        cells += [second[name]["saved_mib"] for name in ("torch compiled", "tile")]
        yield Cells(cells, label=f"{forward['neurons']:,}")


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
