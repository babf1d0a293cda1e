"""What this package raises."""

from sparsellm.system.errors import SparsellmError


class DataError(SparsellmError, ValueError):
    """Documents, a tokenizer, prepared tokens or a data position that cannot be used: what, why, and the remedy."""


class ProcessesFailed(DataError):
    """Nothing is wrong with the data: the processes that work on it cannot start, or ended."""
