"""The base of this package's errors."""


class SparsellmError(Exception):
    """An error whose message is for a person: what is wrong, and what to do. A command ends with it alone."""
