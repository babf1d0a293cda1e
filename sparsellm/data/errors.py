"""Exceptions that sparsellm.data raises."""

from sparsellm.system.errors import SparsellmError


class DataError(SparsellmError, ValueError):
    """Documents, a tokenizer, tokens or a data position cannot be used. The message says which, why, and the remedy."""


class ProcessesFailed(DataError):
    """Data-processing workers could not start, or died. The data itself is fine."""
