"""The exception that sparsellm.config raises."""

from sparsellm.system.errors import SparsellmError


class ConfigError(SparsellmError, ValueError):
    """A configuration has errors. `mistakes`: one message per error, with its remedy."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {m}" for m in mistakes))
