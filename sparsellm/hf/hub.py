"""The Hugging Face hub, for a machine that may have no network.

The hub's libraries ask again and again for half a minute, for each file, before they give up. So the hub is asked once
before them, and where it does not answer, they go on offline, with the copies that an earlier use left in their cache.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsellm.system.console import is_main_rank, warn

SECONDS = 5  # for the hub's answer


def answers(what: str) -> bool:
    """Whether the hub answers. A line on stderr of the main rank says before that `what` is looked for there; another
    one, if not."""
    if is_main_rank():
        warn(f"looking for {what} on the hub")
    if (reason := obstacle()) is not None and is_main_rank():
        warn(f"{reason}: only copies of its files on this machine can be used")
    return reason is None


def obstacle() -> str | None:
    """Why the hub cannot be asked, as a sentence; None if it answers."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # of whatever HTTP client the library uses, or its own in offline mode
        return f"{constants.ENDPOINT} does not answer ({' '.join(str(error).split()) or type(error).__name__})"
    return None


@contextmanager
def offline(enabled: bool) -> Iterator[None]:
    """Keep the Hugging Face libraries off the network, which they otherwise ask even about local files."""
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
    """Whether `name` can only be a local path (the hub's names are OWNER/NAME), and nothing is there."""
    looks_local = name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1
    return looks_local and not Path(name).expanduser().exists()
