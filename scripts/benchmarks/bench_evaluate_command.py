"""Wall time of `sparsellm.evaluate` compared with the stock `lm_eval` command.

    python -m scripts.benchmarks.bench_evaluate_command --data-dir EVAL --tokenizer TOKENIZER [--model 0p5b] [--ranks 2]
    python -m scripts.benchmarks.bench_evaluate_command --data-dir EVAL --checkpoint HF_FOLDER [--limit 20]

Both commands score the same rows, as many as the seven tasks have on the hub (whole_tasks.py; lm_eval knows them as
tasks whole_TASK), with the same checkpoint, dtype and device; lm_eval uses --batch-size. Without --checkpoint the
weights of --model are random. Prints the seconds of each command in each of --rounds, including imports, and the scores
of both. With --ranks above 1 torchrun starts both.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lm_eval.tasks
import torch

from scripts.benchmarks import harness, whole_tasks
from sparsellm.config import from_overrides
from sparsellm.data.tokenizer import end_of_text_id, load, vocabulary_size
from sparsellm.evaluation.tasks import TASKS, on_local_rows
from sparsellm.hf import conversion
from sparsellm.model import Decoder


def random_checkpoint(model: str, tokenizer: Path, folder: Path) -> Path:
    """An hf/ folder of random bfloat16 weights, ReLU."""
    vocabulary = load(str(tokenizer))
    config = from_overrides([f"model={model}", f"model.vocab_size={vocabulary_size(vocabulary)}"]).model
    activation = from_overrides(["sparsity=relu"]).sparsity.activation
    torch.manual_seed(0)
    weights = Decoder(config, activation).state_dict()
    conversion.export(weights, config, activation, folder, tokenizer, end_of_text_id(vocabulary), torch.bfloat16)
    return folder


def define(rows: Path, folder: Path) -> list[str]:
    """Write lm_eval definitions of tasks on `rows` to `folder`; returns their names."""
    folder.mkdir()
    for name, task in TASKS.items():
        stock = Path(lm_eval.tasks.__file__).parent / task.path
        definition = on_local_rows(name, stock, rows / name / f"{task.split}.jsonl") | {"task": f"whole_{name}"}
        (folder / f"{name}.yaml").write_text(json.dumps(definition))  # JSON is YAML
    return [f"whole_{name}" for name in TASKS]


def timed(module: str, arguments: list[str], ranks: int) -> float:
    """Seconds of `python -m MODULE ARGUMENTS` on `ranks` ranks. Exits with its output if it fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", module, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{module} failed with code {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return time.perf_counter() - start


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data-dir", required=True, help="the local rows to repeat, TASK/SPLIT.jsonl")
    parser.add_argument("--checkpoint", type=Path, help="an hf/ folder, instead of random weights")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer, for random weights")
    parser.add_argument(
        "--model", default="0p5b", help="model of random weights, a model choice of `train` (default 0p5b)"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
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
    if (args.checkpoint is None) == (args.tokenizer is None):
        parser.error("give --checkpoint, or --tokenizer for random weights")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole_tasks.write(args.data_dir, folder / "rows")
        checkpoint = args.checkpoint or random_checkpoint(args.model, args.tokenizer, folder / "hf")
        names = define(folder / "rows", folder / "definitions")
        limit = () if args.limit is None else (str(args.limit),)
        seconds: dict[str, list[float]] = {"sparsellm": [], "lm_eval": []}
        scores: dict[str, dict[str, float]] = {}
        for round in range(args.rounds):
            for command in seconds if args.only is None else [args.only]:
                out = folder / f"{command}_{round}"
                if command == "sparsellm":
                    asked = [f"checkpoint={checkpoint.resolve()}", f"data_dir={folder / 'rows'}", f"output_dir={out}"]
                    asked += [f"dtype={args.dtype}", f"device={args.device}", f"kernels={args.kernels}"]
                    took = timed("sparsellm.evaluate", [*asked, *(f"limit={n}" for n in limit)], args.ranks)
                    found = json.loads((out / "results.json").read_text())["tasks"]
                    scores[command] = {task: found[task]["score"] for task in TASKS}
                else:
                    asked = ["run", "--model", "hf", "--tasks", ",".join(names), "--batch_size", args.batch_size]
                    asked += ["--model_args", f"pretrained={checkpoint.resolve()},dtype={args.dtype}"]
                    asked += ["--include_path", str(folder / "definitions"), "--output_path", str(out), "--log_samples"]
                    asked += [] if args.ranks > 1 else ["--device", args.device]
                    took = timed("lm_eval", [*asked, *(["--limit", *limit] if limit else [])], args.ranks)
                    (path,) = out.rglob("results_*.json")
                    found = json.loads(path.read_text())["results"]
                    of = {task: found[f"whole_{task}"] for task in TASKS}
                    scores[command] = {task: of[task].get("acc_norm,none", of[task]["acc,none"]) for task in TASKS}
                seconds[command].append(took)
                print(f"{command}: {took:.1f} s", flush=True)
    harness.table({"task": task} | {command: f"{of[task]:.4f}" for command, of in scores.items()} for task in TASKS)
    harness.write(args.json, {"options": vars(args), "seconds": seconds, "scores": scores})


if __name__ == "__main__":
    main()
