"""`python -m sparsellm.sweep` with stand-ins for training and evaluation, which only write what the real ones leave.

python sweep_with_stand_ins.py OVERRIDE...

A training reads ./pace: {"seconds": of each step, "fail": [names of runs that exit with 7]}. It notes each of its
starts in ./starts, resumes from the rows that are there, and stops at SIGTERM like the real one.
"""

import sys
from pathlib import Path

from sparsellm.commands import sweep
from sparsellm.config import L1Normalization, l1_coefficient_as
from sparsellm.sweep import commands

TRAIN = """
import json, pathlib, signal, sys, time
folder, steps, coefficient = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
relu = sys.argv[4] == "relu"
pace = json.loads(pathlib.Path("pace").read_text()) if pathlib.Path("pace").exists() else {}
asked = []
signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
folder.mkdir(parents=True, exist_ok=True)
with open("starts", "a") as starts:
    starts.write(folder.name + "\\n")
print("training", folder.name, flush=True)
if folder.name in pace.get("fail", []):
    print("a stand-in that fails", file=sys.stderr)
    sys.exit(7)
rows = folder / "metrics.jsonl"
done = len(rows.read_text().splitlines()) if rows.exists() else 0
for step in range(done + 1, steps + 1):
    time.sleep(pace.get("seconds", 0))
    nnz = [100 / step - 1e4 * coefficient, 50 / step] if relu else None
    row = {"step": step, "tokens": 64 * step, "ce": 5 / step, "val_ce": 6 / step + coefficient, "nnz_per_layer": nnz,
           "nnz_mean": sum(nnz) / 2 if relu else None, "dead_per_layer": [step, 2] if relu else None}
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\\n")
    if asked:
        sys.exit(128 + asked[0])
checkpoint = folder / "checkpoints" / f"step_{steps:08d}"
(checkpoint / "hf").mkdir(parents=True)
(checkpoint / "COMMITTED").write_text(json.dumps({"step": steps, "files": {}}))
"""
EVALUATE = """
import json, pathlib, sys
checkpoint = pathlib.Path(sys.argv[1])
print("evaluating", checkpoint, sys.argv[2:], flush=True)
scores = {"arc_easy": {"score": 0.5, "stderr": 0.03}, "piqa": {"score": 0.25, "stderr": 0.04}}
folder = checkpoint / "evaluation" / "".join(word.replace("=", "_") for word in sys.argv[2:] if "limit=" in word)
folder.mkdir(parents=True, exist_ok=True)
(folder / "results.json").write_text(json.dumps({"tasks": scores, "failed": {}, "mean": 0.375}))
"""


def train(sweep, point):
    sparsity = point.config.sparsity
    coefficient = l1_coefficient_as(point.config.sparsity, point.config.model, L1Normalization.sum)
    arguments = [point.folder, point.config.training.steps, coefficient, sparsity.activation.name]
    return [sys.executable, "-c", TRAIN, *map(str, arguments)]


def evaluate(sweep, point):
    return [sys.executable, "-c", EVALUATE, str(Path(point.checkpoint)), *sweep.evaluate]


if __name__ == "__main__":
    commands.train, commands.evaluate = train, evaluate
    sys.exit(sweep.main(sys.argv[1:], "sweep"))
