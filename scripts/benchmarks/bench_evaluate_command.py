"""Wall time of `sparsellm.evaluate` compared with the stock `lm_eval` command.

    python -m scripts.benchmarks.bench_evaluate_command --data-dir EVAL --checkpoint HF_FOLDER [--ranks 2] [--limit 20]

Both commands score the same rows with the same checkpoint, dtype and device; lm_eval uses --batch-size. The local rows
are repeated until there are as many as the seven tasks have on the hub (68,671 requests, one per choice of each row).
Each repeated row starts with a unique name, because equal sequences of tokens would be computed only once. lm_eval gets
the tasks under the names whole_TASK. Prints the seconds of each command in each of --rounds, including imports, and the
scores of both. With --ranks above 1, torchrun starts both. An untrained checkpoint from shaped_checkpoint.py works too,
and a run's folder, whose held-out loss `sparsellm.evaluate` then computes after the tasks.

For `sparsellm.evaluate`, "scoring" is the time from its line about dtype and kernels, when the model is loaded, to the
score of the last task: preparing the requests, computing them, and exchanging the answers between ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

import lm_eval.tasks
import torch

from scripts.benchmarks import harness
from sparsellm.evaluation.tasks import TASKS, local_rows, on_local_rows

ROWS = {
    "arc_easy": 2_376, "arc_challenge": 1_172, "hellaswag": 10_042, "openbookqa": 500, "piqa": 1_838,
    "winogrande": 1_267, "commonsense_qa": 1_221,
}  # fmt: skip
FIELDS = {  # task -> the field with which a request starts
    "arc_easy": "question", "arc_challenge": "question", "hellaswag": "activity_label", "openbookqa": "question_stem",
    "piqa": "goal", "winogrande": "sentence", "commonsense_qa": "question",
}  # fmt: skip
NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")


def write_rows(data_dir: str, folder: Path) -> None:
    """Write FOLDER/TASK/SPLIT.jsonl with ROWS[task] rows per task, made from the .jsonl rows in `data_dir`."""
    names = (" and ".join(names) for length in count(1) for names in product(NAMES, repeat=length))
    names = [next(names) for _ in range(100)]
    for task, number in ROWS.items():
        rows = [json.loads(line) for line in local_rows(task, data_dir).read_text(encoding="utf-8").splitlines()]
        (folder / task).mkdir(parents=True)
        with (folder / task / f"{TASKS[task].split}.jsonl").open("w", encoding="utf-8") as file:
            for i in range(number):
                row, field = rows[i % len(rows)], FIELDS[task]
                named = row if i < len(rows) else row | {field: f"{names[i // len(rows)]}: {row[field]}"}
                file.write(json.dumps(named) + "\n")


def define(rows: Path, folder: Path) -> list[str]:
    """Write to `folder` lm_eval definitions of the tasks, with the rows in `rows`. Returns the tasks' names."""
    folder.mkdir()
    for name, task in TASKS.items():
        stock = Path(lm_eval.tasks.__file__).parent / task.path
        definition = on_local_rows(name, stock, rows / name / f"{task.split}.jsonl") | {"task": f"whole_{name}"}
        (folder / f"{name}.yaml").write_text(json.dumps(definition))  # JSON is YAML
    return [f"whole_{name}" for name in TASKS]


class Took(NamedTuple):
    """Seconds of one command."""

    whole: float  # from its start to its end, including imports
    scoring: float | None  # from the line about dtype and kernels to the last task's score; None for lm_eval


def timed(module: str, arguments: list[str], ranks: int) -> Took:
    """Time `python -m MODULE ARGUMENTS` on `ranks` ranks. If the command fails, exits with the end of its output."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    start, lines, said = time.perf_counter(), [], []
    with subprocess.Popen(
        [sys.executable, *torchrun, "-m", module, *arguments], env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(("sparsellm: dtype ", *(f"{task}  " for task in TASKS))):
                said.append((time.perf_counter() - start, line))
    if process.returncode:
        raise SystemExit(f"{module} failed with code {process.returncode}:\n{''.join(lines)[-6000:]}")
    return Took(time.perf_counter() - start, scoring_seconds(said))


def scoring_seconds(said: list[tuple[float, str]]) -> float | None:
    """The time from the line about dtype and kernels to the last score. `said`: lines, and when they were printed."""
    begin = [when for when, line in said if line.startswith("sparsellm: dtype ")]
    scores = [when for when, line in said if line.split("  ")[0] in TASKS and len(line.split()) == 2]
    return scores[-1] - begin[0] if begin and scores else None


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data-dir", required=True, help="the local rows to repeat, TASK/SPLIT.jsonl")
    parser.add_argument("--checkpoint", type=Path, required=True, help="an hf/ folder, or a run's for sparsellm alone")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--kernels", default="auto", choices=["auto", "cuda", "torch"], help="kernels of sparsellm.evaluate"
    )
    parser.add_argument("--batch-size", default="128", help="batch size of lm_eval (default 128); sparsellm uses auto")
    parser.add_argument("--limit", type=int, help="maximum rows per task")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--rounds", type=int, default=1, help="repetitions of both commands; later ones find rows cached"
    )
    parser.add_argument("--only", choices=["sparsellm", "lm_eval"], help="run only one command")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(args.data_dir, folder / "rows")
        checkpoint = args.checkpoint.resolve()
        names = define(folder / "rows", folder / "definitions")
        limit = () if args.limit is None else (str(args.limit),)
        seconds: dict[str, list[float]] = {"sparsellm": [], "lm_eval": []}
        scoring: list[float | None] = []
        scores: dict[str, dict[str, float]] = {}
        for round in range(args.rounds):
            for command in seconds if args.only is None else [args.only]:
                out = folder / f"{command}_{round}"
                if command == "sparsellm":
                    arguments = [f"checkpoint={checkpoint}", f"data_dir={folder / 'rows'}", f"output_dir={out}"]
                    arguments += [f"dtype={args.dtype}", f"device={args.device}", f"kernels={args.kernels}"]
                    took = timed("sparsellm.evaluate", [*arguments, *(f"limit={n}" for n in limit)], args.ranks)
                    found = json.loads((out / "results.json").read_text())["tasks"]
                    scores[command] = {task: found[task]["score"] for task in TASKS}
                    scoring.append(took.scoring)
                else:
                    arguments = ["run", "--model", "hf", "--tasks", ",".join(names), "--batch_size", args.batch_size]
                    arguments += ["--model_args", f"pretrained={checkpoint},dtype={args.dtype}"]
                    arguments += [
                        "--include_path",
                        str(folder / "definitions"),
                        "--output_path",
                        str(out),
                        "--log_samples",
                    ]
                    arguments += [] if args.ranks > 1 else ["--device", args.device]
                    took = timed("lm_eval", [*arguments, *(["--limit", *limit] if limit else [])], args.ranks)
                    (path,) = out.rglob("results_*.json")
                    found = json.loads(path.read_text())["results"]
                    of = {task: found[f"whole_{task}"] for task in TASKS}
                    scores[command] = {task: of[task].get("acc_norm,none", of[task]["acc,none"]) for task in TASKS}
                seconds[command].append(took.whole)
                only = f", scoring {took.scoring:.1f} s" if took.scoring is not None else ""
                print(f"{command}: {took.whole:.1f} s{only}", flush=True)
    harness.table({"task": task} | {command: f"{of[task]:.4f}" for command, of in scores.items()} for task in TASKS)
    harness.write(args.json, {"options": vars(args), "seconds": seconds, "scoring": scoring, "scores": scores})


if __name__ == "__main__":
    main()
