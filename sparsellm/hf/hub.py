"""The Hugging Face hub, for a machine that may have no network.

The hub's libraries retry for half a minute per file before they give up. So the hub is asked once beforehand; if it
does not answer, the libraries run offline, with the copies in their cache.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsellm.system.console import is_main_rank, warn

SECONDS = 5  # for the hub's answer


def answers(what: str) -> bool:
    """Whether the hub answers. The main rank first logs that it looks for `what` there, and then logs a failure."""
    if is_main_rank():
        warn(f"looking for {what} on the hub")
    if (reason := obstacle()) is not None and is_main_rank():
        warn(f"{reason}: using only files that this machine has cached")
    return reason is None


def obstacle() -> str | None:
    """Why the hub cannot be asked, as a sentence; None if it answers."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # from the library's HTTP client, or its own in offline mode
        return f"{constants.ENDPOINT} does not answer ({' '.join(str(error).split()) or type(error).__name__})"
    return None


@contextmanager
def offline(enabled: bool) -> Iterator[None]:
    """Keep the Hugging Face libraries off the network, which they query even for local files."""
    if not enabled:
        yield
        return
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before[:2]
        if before[2] is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before[2]


def is_missing(name: str) -> bool:
    """Whether `name` can only be a local path (hub names are OWNER/NAME) that does not exist."""
    looks_local = name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1
    return looks_local and not Path(name).expanduser().exists()
