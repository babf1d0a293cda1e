"""Table of measured times, predicted times and chosen engines."""

from collections import defaultdict
from typing import NamedTuple

from sparsellm.ops.plan import Engine
from sparsellm.policy.costs import Costs, costs_at
from sparsellm.policy.layer import Call
from sparsellm.policy.measure import Timed

NEAR = 0.05  # an engine at most this much slower than the fastest counts as equally good


class Choice(NamedTuple):
    """Measured and predicted times of one call on each engine, and the chosen engine."""

    call: Call  # with the dense engine
    nonzeros: float
    union: float  # -1 for few tokens: only the tile engine counts unions, and it is not timed for few tokens
    seconds: dict[Engine, float]
    predicted: dict[Engine, float]
    chosen: Engine

    @property
    def behind(self) -> float:
        """Slowdown of the chosen engine relative to the fastest one: 0.05 is 5% slower."""
        return self.seconds[self.chosen] / min(self.seconds.values()) - 1


def choices(costs: Costs, times: list[Timed]) -> list[Choice]:
    """The choice for every timed call whose nonzeros were counted."""
    dense, by_call = {}, defaultdict(list)
    for each in times:
        if each.call.engine == Engine.dense:
            dense[each.call.tokens, each.call.training] = each.seconds
        else:
            by_call[each.call._replace(engine=Engine.dense)].append(each)
    found = []
    for call, others in by_call.items():
        nonzeros = others[0].nonzeros
        union = next((each.union for each in others if each.call.engine == Engine.tile), -1.0)
        at = costs_at(costs.training if call.training else costs.forward, call.tokens)
        seconds = {Engine.dense: dense[call.tokens, call.training]}
        seconds |= {each.call.engine: each.seconds for each in others}
        predicted = {engine: at[engine].seconds(nonzeros, union) for engine in seconds}
        chosen = costs.choose_engine(call.tokens, nonzeros, union, training=call.training)
        found.append(Choice(call, nonzeros, union, seconds, predicted, chosen if chosen in seconds else Engine.dense))
    return found


def summary(found: list[Choice]) -> str:
    near = sum(choice.behind <= NEAR for choice in found)
    worst = max(found, key=lambda choice: choice.behind)
    return (
        f"chosen: the fastest engine, or one within {NEAR:.0%} of it, in {near} of {len(found)} cases; at most"
        f" {worst.behind:.1%} behind ({worst.call.tokens:,} tokens,"
        f" {worst.nonzeros / worst.call.tokens:.1f} nonzeros per token)"
    )


def text(found: list[Choice]) -> str:
    """One line per case: measured microseconds of a call, and in brackets the time predicted by the fit."""
    engines = tuple(Engine)
    lines = []
    for training in (False, True):
        lines += [
            "",
            f"{'forward and backward' if training else 'forward'}: measured microseconds of a call (predicted)",
        ]
        names = "".join(f"{engine.name:>20}" for engine in engines)
        lines.append(f"{'tokens':>8}{'nnz/token':>10}{'union':>8}{names}  chosen   behind")
        for choice in found:
            if choice.call.training != training:
                continue
            tokens = choice.call.tokens
            union = f"{choice.union / -(-tokens // 128):,.0f}" if choice.union >= 0 else "-"
            cells = [
                f"{choice.seconds[engine] * 1e6:,.1f} ({choice.predicted[engine] * 1e6:,.1f})"
                if engine in choice.seconds else "-"
                for engine in engines
            ]  # fmt: skip
            lines.append(
                f"{tokens:>8,}{choice.nonzeros / tokens:>10,.1f}{union:>8}{''.join(f'{cell:>20}' for cell in cells)}"
                f"  {choice.chosen.name:<7}{choice.behind:>7.1%}"
            )
    return "\n".join([*lines[1:], "", summary(found)])
