from sparsellm.system.errors import SparsellmError


class AnalysisError(SparsellmError, RuntimeError):
    """The checkpoint cannot be analyzed as asked; the message says why."""
