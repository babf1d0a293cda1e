"""The base of this package's errors."""


class SparsellmError(Exception):
    """An error with a message for the user: what is wrong, and what to do. A command ends with only this message."""
