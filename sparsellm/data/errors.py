"""What this package raises."""


class DataError(ValueError):
    """Documents, a tokenizer, prepared tokens or a data position that cannot be used: what, why, and the remedy."""
