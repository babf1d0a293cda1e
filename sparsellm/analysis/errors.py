from sparsellm.system.errors import SparsellmError


class AnalysisError(SparsellmError, RuntimeError):
    """The checkpoint cannot be analyzed as requested; the message says why."""
