"""CPU time of an evaluation without the model: lm-eval alone, and ours. Needs no GPU.

    python -m scripts.benchmarks.bench_evaluate_host --data-dir EVAL --tokenizer TOKENIZER [--limit 200]

Both run lm-eval's `evaluate` on as many rows as the seven tasks have on the hub (whole_tasks.py), with the same instant
fake answers. Prints CPU seconds per 1,000 requests: of the thread that a GPU waits for, of the thread that builds
requests ahead, and of the tokenizer's threads; and whether scores and samples are the same.
"""

import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval.utils
import torch
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from scripts.benchmarks import harness, whole_tasks
from sparsellm.distributed.groups import process_group
from sparsellm.evaluation import downstream, task_requests, tasks
from sparsellm.hf.hub import offline


def made_up(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """A fake answer that depends on every token."""
    return -float(sum(context) % 89 + sum(continuation) % 97), False


class Plain(HFLM):
    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        return [made_up(context, continuation) for _, context, continuation in requests]


class Ours(downstream.SharedLM):
    def _answers(self, batch: Any) -> Any:
        return lambda: [made_up(*request) for request in batch]


@contextmanager
def uncached():
    """Compile a template for each text, like stock lm-eval."""
    environment = lm_eval.utils.env
    cached = environment.from_string
    environment.from_string = cached.__wrapped__
    try:
        yield
    finally:
        environment.from_string = cached


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data-dir", required=True, help="the local rows to repeat, TASK/SPLIT.jsonl")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="maximum number of rows per task")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
    small = LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                        max_position_embeddings=2048)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(small)
    build, ahead = task_requests.Share.__init__, [0.0]

    def timed(self: Any, *arguments: Any) -> None:
        start = time.thread_time()
        build(self, *arguments)
        ahead[0] += time.thread_time() - start

    task_requests.Share.__init__ = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, offline(True), process_group("cpu") as ranks:
        whole_tasks.write(args.data_dir, Path(folder, "rows"))
        found: dict[str, Any] = {}
        rows = []
        for name in ("lm-eval", "ours"):
            loaded = [tasks.load(task, str(Path(folder, "rows"))) for task in tasks.TASKS]
            main_start, start, ahead[0] = time.thread_time(), time.process_time(), 0.0
            if name == "ours":
                lm = Ours(model, tokenizer, ranks, "auto")
                lm.builder.announce(loaded, args.limit)
                found[name] = [downstream.score(lm, task, args.limit) for task in loaded]
            else:
                plain = Plain(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
                with uncached():
                    of = {task.name: task.task for task in loaded}
                    result = evaluator.evaluate(plain, {"tasks": of, "groups": {}}, limit=args.limit)
                found[name] = [(result["results"][task.name], result["samples"][task.name]) for task in loaded]
            used, whole = time.thread_time() - main_start, time.process_time() - start
            requests = sum(len(sample["arguments"]) for _, samples in found[name] for sample in samples)
            each = [1000 * seconds / requests for seconds in (used, ahead[0], whole - used - ahead[0])]
            columns = zip(("main", "ahead", "tokenizer"), each, strict=True)
            rows.append({"CPU seconds per 1,000 requests": name} | {title: f"{s:.3f}" for title, s in columns})
            rows[-1]["requests"] = f"{requests:,}"
    harness.table(rows)
    same = [
        samples == theirs and all(result[key] == of.get(f"{key},none") for key in ("acc", "acc_stderr", "acc_norm"))
        for (result, samples), (of, theirs) in zip(found["ours"], found["lm-eval"], strict=True)
    ]
    harness.write(args.json, rows)
    print(f"scores and samples are {'the same' if all(same) else 'NOT the same'}")


if __name__ == "__main__":
    main()
