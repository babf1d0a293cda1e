"""Which steps of a run are saved, which checkpoints are kept, and how many exist at once."""

from collections.abc import Iterator
from itertools import islice

from sparsellm.config import OptimizerConfig, RunConfig, Schedule, SparsityConfig, TrainingConfig, decay_start


def last_common_step(training: TrainingConfig, optimizer: OptimizerConfig, sparsity: SparsityConfig) -> int:
    """The last step that a run shares with a longer run; 0 if there is none, as without optimizer.schedule=wsd.

    After it the learning rate decays, or dead neurons are no longer reinitialized, because the run is about to end.
    """
    if optimizer.schedule != Schedule.wsd:
        return 0
    last_draw = training.steps - -(-(sparsity.reinit_dead_after_tokens or 0) // training.tokens_per_step)
    return max(0, min(decay_start(optimizer, training.steps), last_draw))


class Retention:
    """Checkpoints every run.checkpoint_every steps, of which the newest run.keep_checkpoints are kept.

    Two kinds are permanent: the first one of each run.keep_every steps (step N itself, unless its save failed or had to
    wait for a finite gradient), and, with optimizer.schedule=wsd, the newest one up to the last common step, from which
    the run can be extended.
    """

    def __init__(self, run: RunConfig, steps: int, last_common: int) -> None:
        """`last_common`: the result of `last_common_step`."""
        self.run, self.steps, self.last_common = run, steps, last_common
        self._intervals = [every for every in (self.run.checkpoint_every, self.run.keep_every) if every]

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due at `step`."""
        return step in (self.last_common, self.steps) or any(step % every == 0 for every in self._intervals)

    def for_good(self, steps: list[int]) -> set[int]:
        """The permanent checkpoints among `steps` (ascending)."""
        found: dict[int, int] = {}  # the first checkpoint of each keep_every steps
        if self.run.keep_every:
            for step in steps:
                found.setdefault(step // self.run.keep_every, step)
            found.pop(0, None)  # no milestone is before step keep_every
        return {*found.values(), *[step for step in steps if step <= self.last_common][-1:]}

    def most_at_once(self, there: list[int]) -> int:
        """The largest number of checkpoints that will exist at once, including the one being written.

        `there`: the steps of existing checkpoints, ascending.
        """
        last, count = max(there, default=0), self.run.keep_checkpoints + 1
        to_come = list(islice(self._saves_backwards(last), count))
        if not to_come:
            return len(there)
        newest = [*to_come, *reversed(there)][:count]  # when the last one is written
        common = [self.last_common] if self.last_common > last else []
        older = {step for step in self.for_good(sorted({*there, *common, *newest})) if step < newest[-1]}
        milestones = 0
        if every := self.run.keep_every:  # permanent ones in between, which `newest` omits
            milestones = max(0, (newest[-1] - 1) // every - last // every)
            milestones -= sum(step > last and step % every == 0 for step in older)
        return max(len(there) + 1, len(newest) + len(older) + milestones)

    def _saves_backwards(self, last: int) -> Iterator[int]:
        """The steps after `last` at which checkpoints are due, in reverse."""
        step = self.steps
        while step > last:
            yield step
            common = self.last_common if self.last_common < step else 0
            step = max(common, *((step - 1) // every * every for every in self._intervals))
