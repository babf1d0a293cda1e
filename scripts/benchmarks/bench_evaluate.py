"""Throughput of the downstream evaluation compared with lm-eval's own `hf` model, on the same requests in one process.

    python -m scripts.benchmarks.bench_evaluate --data-dir DIR --tokenizer FOLDER [--activations DIR] [--mean 36]
    python -m scripts.benchmarks.bench_evaluate --data-dir DIR --checkpoint HF_FOLDER

Without --checkpoint, the model is a Hugging Face Llama with ReLU and 1.5B random parameters in bfloat16, as in
bench_model.py, whose neurons fire at recorded rates on the tasks' own texts (shaped_models.py).

A variant's time is wall time from the requests of all tasks, task by task, to their answers, including tokenization,
with the GPU idle before and after. Variants alternate in each of --rounds, and each one's minimum counts. lm-eval's
`hf` runs at each of --batch-sizes, and ratios are to the fastest of these. `ours` chooses its batches by length; `ours,
kernels` is `ours` after `sparsellm.accelerate`. Also printed: how far the log-probabilities of continuations are from
those of `hf` at its first batch size, and for how many questions another option is the most likely.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import sparsellm
from scripts.benchmarks import harness, patterns
from scripts.benchmarks.bench_model import MODEL, random_model, sharing_copy
from scripts.benchmarks.shaped_models import CALIBRATION, firing_statistics, layer_rates, shape_to_rates
from sparsellm.distributed.groups import process_group
from sparsellm.evaluation.tasks import TASKS, load
from sparsellm.hf import pretrained
from sparsellm.hf.hub import offline
from sparsellm.inference.accelerate import policy_of

Answers = list[tuple[float, bool]]
Score = Callable[[list[Any]], Answers]


def requests_of(name: str, data_dir: str, limit: int | None) -> list[Any]:
    """lm-eval's zero-shot requests of the task `name`, of its first `limit` rows."""
    task = load(name, data_dir).task
    task.build_all_requests(limit=limit)
    return task.instances


def shaped_model(
    tokenizer: Any, texts: list[str], layers: int, activations: Path | None, mean: float | None
) -> nn.Module:
    """The random model, shaped to fire on `texts` at recorded rates; prints how often it does fire."""
    config = replace(MODEL, num_layers=layers, vocab_size=len(tokenizer))
    model = random_model(config, "cuda", 0.0, seed=0)
    tokens = torch.tensor(tokenizer("\n".join(texts))["input_ids"][:CALIBRATION], device="cuda")
    length = config.context_length
    tokens = tokens[: len(tokens) // length * length].view(-1, length)
    shape_to_rates(model, tokens, layer_rates(layers, config.intermediate_size, activations, mean))
    nonzeros, unions = firing_statistics(model, tokens)
    print(f"nonzeros per token: mean {np.mean(nonzeros):.1f}; union of 128 tokens: mean {np.mean(unions):,.0f}")
    return model


def options_apart(
    one: dict[str, Answers], other: dict[str, Answers], requests: dict[str, list[Any]]
) -> tuple[float, int]:
    """(largest difference of log-probabilities, number of questions with another most likely option)."""
    largest, changed = 0.0, 0
    for name, found in one.items():
        first, second = np.array([a[0] for a in found]), np.array([a[0] for a in other[name]])
        largest = max(largest, float(np.abs(first - second).max()))
        question = np.array([instance.doc_id for instance in requests[name]])
        for number in np.unique(question):
            mine = question == number
            changed += int(first[mine].argmax() != second[mine].argmax())
    return largest, changed


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data-dir", required=True, help="local rows, TASK/SPLIT.jsonl or .parquet")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK", choices=list(TASKS))
    parser.add_argument("--limit", type=int, help="maximum rows per task")
    parser.add_argument("--checkpoint", type=Path, help="an hf/ folder, instead of random weights")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer, for random weights")
    patterns.add_activations(parser)
    parser.add_argument("--mean", type=float, help="nonzeros per token, averaged over layers (default: as recorded)")
    parser.add_argument("--layers", type=int, default=MODEL.num_layers)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    gpu = harness.gpu()
    if (args.checkpoint is None) == (args.tokenizer is None):
        parser.error("give --checkpoint, or --tokenizer for random weights")

    with offline(True), process_group("cuda") as ranks:
        from lm_eval.models.huggingface import HFLM
        from transformers import AutoTokenizer

        from sparsellm.evaluation.downstream import SharedLM

        tokenizer = AutoTokenizer.from_pretrained(args.checkpoint or args.tokenizer, trust_remote_code=False)
        requests = {name: requests_of(name, args.data_dir, args.limit) for name in args.tasks}
        if args.checkpoint is None:
            texts = ["".join(instance.args) for instances in requests.values() for instance in instances]
            model = shaped_model(tokenizer, texts, args.layers, args.activations, args.mean)
        else:
            model = pretrained.read_model(args.checkpoint, torch.bfloat16).to("cuda").eval()
        sparse = sparsellm.accelerate(sharing_copy(model), "cuda")

        variants: dict[str, Score] = {}
        for size in args.batch_sizes:
            lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=size)
            variants[f"lm-eval hf, batch size {size}"] = lambda asked, lm=lm: lm.loglikelihood(asked, disable_tqdm=True)
        for name, each in (("ours", model), ("ours, kernels", sparse)):
            shared = SharedLM(each, tokenizer, ranks, "auto")
            shared.task_name = name
            variants[name] = shared.loglikelihood

        count = sum(map(len, requests.values()))
        parameters = sum(p.numel() for p in model.parameters())
        print(
            f"{gpu}: {parameters / 1e9:.2f}B parameters, bfloat16;"
            f" {count:,} requests of {len(requests)} tasks; engines are chosen by"
            f" {policy_of(sparse).chosen_by(model.config.hidden_size, model.config.intermediate_size)}",
            flush=True,
        )
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        answers: dict[str, dict[str, Answers]] = {}
        warm = requests[min(requests, key=lambda name: len(requests[name]))]
        for score in variants.values():
            score(warm)
        for _ in range(args.rounds):
            for name, score in variants.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                answers[name] = {task: score(asked) for task, asked in requests.items()}
                torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - start)
                print(f"  {name}: {seconds[name][-1]:.2f} s", flush=True)

    first = next(iter(variants))
    best = min(min(found) for name, found in seconds.items() if name.startswith("lm-eval"))
    rows = {}
    for name, found in seconds.items():
        off, changed = options_apart(answers[name], answers[first], requests)
        rows[name] = {"seconds": found, "requests_per_s": count / min(found), "ratio": best / min(found),
                      "largest_difference": off, "ranked_otherwise": changed}  # fmt: skip
    harness.table(
        {
            "variant": name, "seconds": f"{min(row['seconds']):.2f}", "requests/s": f"{row['requests_per_s']:,.0f}",
            "of best hf": f"{row['ratio']:.3f}", "log-prob. off": f"{row['largest_difference']:.3f}",
            "ranked other": str(row["ranked_otherwise"]),
        }
        for name, row in rows.items()
    )  # fmt: skip
    harness.write(args.json, {"gpu": gpu, "parameters": parameters, "requests": count, "variants": rows})


if __name__ == "__main__":
    main()
