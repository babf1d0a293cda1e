"""Exceptions of this package."""

from sparsellm.system.errors import SparsellmError


class DataError(SparsellmError, ValueError):
    """Documents, a tokenizer, prepared tokens or a data position cannot be used. The message says which, why, and the
    remedy."""


class ProcessesFailed(DataError):
    """The processes that work on the data cannot start, or died. The data itself is fine."""
