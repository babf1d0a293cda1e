"""The base of this package's errors, and the text of any error."""


class SparsellmError(Exception):
    """An error with a message for the user: what is wrong, and what to do. A command ends with only this message."""


def one_line(error: BaseException) -> str:
    """The kind and the text of `error` on one line, for messages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
