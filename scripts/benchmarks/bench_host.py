"""Host time of one eager feedforward block: transformers' own LlamaMLP, and accelerated.

    python -m scripts.benchmarks.bench_host

K 2,048, N 5,632, bfloat16, random weights with enough active neurons for the automatic choice to be dense. Only
enqueueing is timed: no call waits for the device, which is idle before each round. Microseconds, medians of five
rounds.
"""

import statistics
import timeit
from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import sparsellm
from scripts.benchmarks import harness

ROUNDS, UNTIMED = 5, 10


def block(accelerate: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The feedforward block of a one-layer model, after `accelerate`. The weights are the same in every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=1, num_attention_heads=32, vocab_size=512,
        hidden_act="relu",
    )  # fmt: skip
    return accelerate(LlamaForCausalLM(config).cuda().bfloat16().eval()).model.layers[0].mlp


def microseconds(call: Callable[[], object], calls: int) -> float:
    rounds = timeit.repeat(call, setup=torch.cuda.synchronize, number=calls, repeat=ROUNDS)
    return 1e6 * statistics.median(rounds) / calls


def main() -> None:
    args = harness.parser(__doc__).parse_args()
    print(harness.gpu())
    blocks = {
        "LlamaMLP": block(lambda model: model),
        "accelerated": block(lambda model: sparsellm.accelerate(model, "cuda")),
        "engine='row'": block(lambda model: sparsellm.accelerate(model, "cuda", "row")),
    }
    rows = []
    for mode in (torch.no_grad, torch.inference_mode):
        for tokens in (1, 16, 64, 256, 4096):
            x = torch.randn(1, tokens, 2048, device="cuda", dtype=torch.bfloat16)
            calls = 20 if tokens > 1000 else 200  # more calls would fill the queue and block the host
            with mode():
                for each in blocks.values():
                    for _ in range(UNTIMED):
                        each(x)
                times = {name: microseconds(lambda each=each, x=x: each(x), calls) for name, each in blocks.items()}
            columns = {name: f"{time_:.1f}" for name, time_ in times.items()}
            rows.append({"microseconds": mode.__name__, "tokens": f"{tokens:,}"} | columns)
    harness.table(rows)
    harness.write(args.json, rows)


if __name__ == "__main__":
    main()
