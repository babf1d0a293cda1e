"""Which steps of a run are saved, which checkpoints are kept, and how many exist at once."""

from collections import deque

from sparsellm.config import OptimizerConfig, RunConfig, Schedule, SparsityConfig, TrainingConfig, decay_start


def last_common_step(training: TrainingConfig, optimizer: OptimizerConfig, sparsity: SparsityConfig) -> int:
    """The last step that a run has in common with a longer run; 0 if none, as without optimizer.schedule=wsd.

    After this step the learning rate decays, or dead neurons are no longer reinitialized, because the run is about to
    end; a longer run continues from here.
    """
    if optimizer.schedule != Schedule.wsd:
        return 0
    last_draw = training.steps - -(-(sparsity.reinit_dead_after_tokens or 0) // training.tokens_per_step)
    return max(0, min(decay_start(optimizer, training.steps), last_draw))


class Retention:
    """Decides which checkpoints to save (every run.checkpoint_every steps) and to keep (the newest keep_checkpoints).

    Two kinds of checkpoints are permanent: the first of each run.keep_every steps (a later step than planned if a save
    failed or had to wait for a finite gradient), and, with optimizer.schedule=wsd, the newest up to the last common
    step, from which the run can be extended.
    """

    def __init__(self, run: RunConfig, steps: int, last_common: int) -> None:
        """`last_common`: the result of `last_common_step`."""
        self.run, self.steps, self.last_common = run, steps, last_common
        self._intervals = [every for every in (run.checkpoint_every, run.keep_every) if every]

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due at `step`."""
        return step in (self.last_common, self.steps) or any(step % every == 0 for every in self._intervals)

    def for_good(self, steps: list[int]) -> set[int]:
        """The permanent checkpoints among `steps` (ascending)."""
        return {*self._firsts(steps).values(), *self._common(steps)}

    def _firsts(self, steps: list[int]) -> dict[int, int]:
        """{i: the first of `steps` from i * keep_every up to the next multiple of keep_every}, for i >= 1."""
        found: dict[int, int] = {}
        for step in steps:
            if self.run.keep_every and step >= self.run.keep_every:
                found.setdefault(step // self.run.keep_every, step)
        return found

    def _common(self, steps: list[int]) -> list[int]:
        """The last of `steps` from which the run can be extended; empty if there is none."""
        return [step for step in steps if step <= self.last_common][-1:]

    def most_at_once(self, there: list[int]) -> int:
        """The largest number of checkpoints that will exist at once, including the one being written.

        `there`: the steps of existing checkpoints, ascending.
        """
        last, most, existing = max(there, default=0), len(there), len(there)
        newest, firsts, common = deque(there, self.run.keep_checkpoints), self._firsts(there), self._common(there)
        permanent, every = set(firsts.values()), self.run.keep_every
        due = {self.last_common, self.steps}.union(*(range(0, self.steps, every) for every in self._intervals))
        for step in sorted(step for step in due if step > last):
            most = max(most, existing + 1)
            newest.append(step)
            common = self._common([*common, step])
            if every and step >= every and firsts.setdefault(step // every, step) == step:
                permanent.add(step)
            existing = len(permanent) + len({*newest, *common} - permanent)
        return most
