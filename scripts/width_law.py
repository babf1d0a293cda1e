"""A law of held-out cross entropy and nonzeros against width, L1 coefficient and tokens, fitted to finished runs.

    cross entropy = E + A N^(-1/2) + B C^(1/2) - D ln T
    nonzeros      = K N^s T^t / (1 + C / C0)

N neurons per layer over 1,408, C the L1 coefficient (`sum`) over 1e-5, T training tokens over 100M; nonzeros per token
and layer, mean over layers. E and K depend on the data; runs of different data share everything else.

    python -m scripts.width_law --data RUNS ... --data RUNS ... --output law.png --json law.json

Each --data takes run folders or files (see scripts/evidence_report.py) whose runs had the same training and held-out
text. The law is fitted to ReLU runs with AdamW at --learning-rate and a constant coefficient of at most --most, without
remedies for dead neurons.

Each arm, which is a width and a coefficient, is then predicted from the runs of all other arms, by the law and by other
forms. A run is not predicted if the other arms do not determine it, as when it is alone in its data. The figure has the
law of the first --data beside its runs, and the errors of all predictions.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from scripts.benchmarks.harness import cell, table, write
from scripts.compare_runs import checksum
from scripts.evidence_report import Run, lines_of
from sparsellm.figures import GREY, STYLE, legend_below, percent, plain, saved
from sparsellm.sweep.figure import spelled

Array = NDArray[Any]
WIDTH, COEFFICIENT, TOKENS = 1408, 1e-5, 1e8  # units
NATS, SHARE = 0.01, 0.25  # the largest errors of a useful prediction: of cross entropy, and relative, of nonzeros
HALVES = np.geomspace(0.1, 100, 601)  # candidates for C0, 1.2% apart


class Runs(NamedTuple):
    """Columns of n runs, in the units above."""

    data: Array  # int [n]: the number of the run's --data
    width: Array
    coefficient: Array
    tokens: Array
    ce: Array
    nonzeros: Array

    def where(self, chosen: Array) -> "Runs":
        return Runs(*(column[chosen] for column in self))


Form = Callable[[Array, Array], list[Array]]  # width, coefficient -> features
LOSS, COUNT = "N^(-1/2), C^(1/2)", "s log N - log(1 + C / C0)"  # the law's forms
LOSSES: dict[str, Form] = {
    LOSS: lambda n, c: [n**-0.5, c**0.5],
    "log N, C^(1/2)": lambda n, c: [np.log(n), c**0.5],
    "log N, C^(1/2), their product": lambda n, c: [np.log(n), c**0.5, np.log(n) * c**0.5],
    "N^(-1/2), log C": lambda n, c: [n**-0.5, np.log(c)],
}
COUNTS: dict[str, Form] = {  # of log nonzeros
    COUNT: lambda n, c: [np.log(n)],
    "log N, log C": lambda n, c: [np.log(n), np.log(c)],
    "log N, log C, their product": lambda n, c: [np.log(n), np.log(c), np.log(n) * np.log(c)],
    "log N, log C, its square": lambda n, c: [np.log(n), np.log(c), np.log(c) ** 2],
}


class Fit(NamedTuple):
    predicted: Array  # [n] of the new runs; NaN where the fitted runs do not determine a value
    weights: list[float]  # a constant for each data set, the weight of ln T, those of the form's features
    half: float = np.inf  # C0, at which nonzeros are half of those without L1


def _fit(form: Form, y: Array, runs: Runs, new: Runs, halves: Array) -> Fit:
    """Least squares of y [n] - log(1 + C / C0), for the C0 of `halves` with the smallest residuals."""
    kinds = np.arange(runs.data.max() + 1)
    x, x_new = (
        np.column_stack([each.data[:, None] == kinds, np.log(each.tokens), *form(each.width, each.coefficient)])
        for each in (runs, new)
    )
    inverse = np.linalg.pinv(x)
    bends = np.log1p(runs.coefficient[:, None] / halves)  # [n, halves]
    weights = inverse @ (y[:, None] + bends)
    best = int(((x @ weights - bends - y[:, None]) ** 2).sum(0).argmin())
    determined = np.isclose(x_new @ inverse @ x, x_new, atol=1e-6).all(1)
    predicted = x_new @ weights[:, best] - np.log1p(new.coefficient / halves[best])
    return Fit(np.where(determined, predicted, np.nan), weights[:, best].tolist(), float(halves[best]))


def fit_loss(form: str, runs: Runs, new: Runs) -> Fit:
    return _fit(LOSSES[form], runs.ce, runs, new, np.array([np.inf]))


def fit_nonzeros(form: str, runs: Runs, new: Runs) -> Fit:
    halves = HALVES if form == COUNT else np.array([np.inf])
    fit = _fit(COUNTS[form], np.log(runs.nonzeros), runs, new, halves)
    return fit._replace(predicted=np.exp(fit.predicted))


def left_out(fit: Callable[[str, Runs, Runs], Fit], form: str, runs: Runs) -> Array:
    """[n]: each run predicted from the runs of all other arms."""
    predicted = np.full(len(runs.ce), np.nan)
    for width, coefficient in {*zip(runs.width, runs.coefficient, strict=True)}:
        arm = (runs.width == width) & (runs.coefficient == coefficient)
        predicted[arm] = fit(form, runs.where(~arm), runs.where(arm)).predicted
    return predicted


def errors(differences: Array, floor: float) -> dict[str, float]:
    """Of the runs that were predicted: root mean square, largest, and how many of them are within the floor."""
    known = np.abs(differences[np.isfinite(differences)])
    within = int((known <= floor).sum())
    return {"rms": float(np.sqrt((known**2).mean())), "largest": float(known.max()), "within": within, "of": len(known)}


def read(groups: list[list[Path]], learning_rate: float, most: float) -> tuple[list[Run], Runs]:
    """The runs that the law is fitted to, and their columns."""
    found, rows = [], []
    for data, paths in enumerate(groups):
        for run in (Run(line) for path in paths for line in lines_of(path)):
            config = run.line["config"]
            sparse = run.relu and 0 < run.coefficient <= most and run.remedy is None
            if sparse and not config.get("optimizer.muon") and config["optimizer.learning_rate"] == learning_rate:
                units = run.width / WIDTH, run.coefficient / COEFFICIENT, run.last["tokens"] / TOKENS
                found.append(run)
                rows.append((data, *units, run.ce, run.nonzeros))
    return found, Runs(*map(np.array, zip(*rows, strict=True)))


def result(groups: list[list[Path]], learning_rate: float, most: float) -> dict[str, Any]:
    """The law, the errors of every form, and each run with its predictions."""
    found, runs = read(groups, learning_rate, most)
    later = runs._replace(nonzeros=np.array([np.mean(run.last["nnz_per_layer"][1:]) for run in found]))
    *e, d, a, b = fit_loss(LOSS, runs, runs).weights
    laws: dict[str, Any] = {"cross entropy": {"E": e, "A": a, "B": b, "D": -d}}
    losses = {form: left_out(fit_loss, form, runs) for form in LOSSES}
    all_errors: dict[str, Any] = {"cross entropy": {form: errors(p - runs.ce, NATS) for form, p in losses.items()}}
    columns = {"ce": runs.ce, "predicted_ce": losses[LOSS]}
    for name, counted in (("nonzeros", runs), ("nonzeros without the first layer", later)):
        fit = fit_nonzeros(COUNT, counted, counted)
        *k, t, s = fit.weights
        laws[name] = {"K": np.exp(k).tolist(), "s": s, "t": t, "C0": fit.half * COEFFICIENT}
        counts = {form: left_out(fit_nonzeros, form, counted) for form in COUNTS}
        all_errors[name] = {form: errors(p / counted.nonzeros - 1, SHARE) for form, p in counts.items()}
        columns |= {name: counted.nonzeros, f"predicted {name}": counts[COUNT]}
    names = [[path.name for path in paths] for paths in groups]
    rows = [
        {"run": run.name, "data": int(runs.data[i]), "N": run.width, "l1_coefficient": run.coefficient,
         "tokens": run.last["tokens"], "seed": run.seed}
        | {name: None if np.isnan(column[i]) else float(column[i]) for name, column in columns.items()}
        for i, run in enumerate(found)
    ]  # fmt: skip
    return {"data": names, "law": laws, "errors": all_errors, "runs": rows}


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    loss, nonzeros, apart = figure.subplots(1, 3)
    shown = [run for run in found["runs"] if run["data"] == 0]
    shown = [run for run in shown if run["tokens"] == shown[0]["tokens"]]
    widths, coefficients = (sorted({run[key] for run in shown}) for key in ("N", "l1_coefficient"))
    line, tokens, law = np.geomspace(widths[0], widths[-1], 100), shown[0]["tokens"] / TOKENS, found["law"]
    of_loss, of_nonzeros = law["cross entropy"], law["nonzeros"]
    n = line / WIDTH
    for number, coefficient in enumerate(coefficients):
        alike = [run for run in shown if run["l1_coefficient"] == coefficient]
        style: dict[str, Any] = {"color": f"C{number}", "label": spelled(coefficient)}
        price = of_loss["B"] * (coefficient / COEFFICIENT) ** 0.5 - of_loss["D"] * np.log(tokens)
        loss.plot(line, of_loss["E"][0] + of_loss["A"] * n**-0.5 + price, **style)
        without = of_nonzeros["K"][0] * n ** of_nonzeros["s"] * tokens ** of_nonzeros["t"]
        nonzeros.plot(line, without / (1 + coefficient / of_nonzeros["C0"]), **style)
        for axes, key in ((loss, "ce"), (nonzeros, "nonzeros")):
            axes.plot([run["N"] for run in alike], [run[key] for run in alike], "o", color=f"C{number}")
    for axes, label in ((loss, "held-out cross entropy"), (nonzeros, "nonzeros per token and layer")):
        axes.set(xlabel="neurons per layer", ylabel=label, xscale="log")
        axes.set_xticks(widths, [f"{width:,}" for width in widths])
        axes.minorticks_off()
    nonzeros.set_yscale("log")
    plain(nonzeros.yaxis)
    legend_below(figure, loss.get_lines()[::2], map(spelled, coefficients))
    known = [run for run in found["runs"] if None not in run.values()]
    for number, names in enumerate(found["data"]):
        points = [
            (run["predicted_ce"] - run["ce"], run["predicted nonzeros"] / run["nonzeros"] - 1)
            for run in known if run["data"] == number
        ]  # fmt: skip
        apart.plot(*zip(*points, strict=True), "os^v"[number], color=GREY, label=names[0].removesuffix(".jsonl"))
    apart.add_patch(Rectangle((-NATS, -SHARE), 2 * NATS, 2 * SHARE, color=GREY, alpha=0.15, linewidth=0))
    apart.set(xlabel="error of cross entropy, left out of the fit", ylabel="error of nonzeros, left out of the fit")
    percent(apart.yaxis)
    apart.legend()
    return figure


def report(found: dict[str, Any]) -> None:
    for name, law in found["law"].items():
        print(name, ", ".join(f"{key} {np.round(value, 8)}" for key, value in law.items()))
    for name, forms in found["errors"].items():
        print(f"\n{name}, each arm left out")
        table({"form": form, "rms": f"{each['rms']:.4f}", "largest": f"{each['largest']:.4f}",
               "within the floor": f"{each['within']} of {each['of']}"} for form, each in forms.items())  # fmt: skip
    print()
    table({
        "run": run["run"], "N": f"{run['N']:,}", "L1": spelled(run["l1_coefficient"]), "tokens": f"{run['tokens']:,}",
        "cross entropy": f"{run['ce']:.4f}", "predicted": cell(run["predicted_ce"], ".4f"),
        "nonzeros": f"{run['nonzeros']:.1f}", "predicted ": cell(run["predicted nonzeros"], ".1f"),
    } for run in found["runs"])  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", type=Path, action="append", required=True, metavar="RUNS")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--most", type=float, default=1.6e-4, help="the largest coefficient that is fitted")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the law, the errors and the runs to this file")
    parser.add_argument("--output", type=Path, metavar="PNG", help="figure to write")
    args = parser.parse_args(arguments)
    found = result(args.data, args.learning_rate, args.most)
    report(found)
    write(args.json, found)
    if args.output is not None:
        with matplotlib.rc_context(STYLE):
            args.output.write_bytes(saved(draw(found), Source=checksum({"runs": found["runs"]})))


if __name__ == "__main__":
    main()
