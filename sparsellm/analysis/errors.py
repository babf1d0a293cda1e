class AnalysisError(RuntimeError):
    """The checkpoint cannot be analyzed as asked; the message says why."""
