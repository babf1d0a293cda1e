"""Access to the Hugging Face hub from a machine that may be offline.

The hub's libraries retry for half a minute per file before they give up. So one request checks beforehand whether the
hub answers; if not, the libraries run offline and use their cache.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsellm.system.console import warn, warn_on_main
from sparsellm.system.errors import one_line

SECONDS = 5  # timeout for the hub's answer
PATIENCE = (2, 5, 10, 30, 60, 120, 240)  # seconds between attempts while the hub fails


def answers(what: str) -> bool:
    """Whether the hub answers. The main rank prints that it looks for `what` on the hub, and if that fails, why."""
    warn_on_main(f"looking for {what} on the hub")
    if (reason := obstacle()) is not None:
        warn_on_main(f"{reason}: using only files that this machine has cached")
    return reason is None


def obstacle() -> str | None:
    """Why the hub cannot be reached, as a sentence; None if it answers."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # the HTTP client's error, or the library's own error in offline mode
        return f"{constants.ENDPOINT} does not answer ({one_line(error)})"
    return None


def is_temporary(error: Exception) -> bool:
    """Whether `error` is a timeout, a lost connection, or an answer that says to come back later."""
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):  # a ConnectionError, but waiting does not help
        return False
    if not isinstance(error, HTTPError):  # the base of the HTTP client's errors, not all of which are OSErrors
        return isinstance(error, ConnectionError | TimeoutError)
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status >= 500 or status in (408, 429)


def waits(error: Exception, what: str, attempt: int) -> bool:
    """Wait after consecutive failure number `attempt` (from 0). After the last attempt, returns False at once."""
    if attempt == len(PATIENCE):
        return False
    warn(f"{what}: the hub does not answer ({one_line(error)}); trying again in {PATIENCE[attempt]} s")
    time.sleep(PATIENCE[attempt])
    return True


def answer(call: Callable[[], Any], what: str) -> Any:
    """The result of `call`, a hub request for `what`, which is retried while it fails temporarily."""
    attempt = 0
    while True:
        try:
            return call()
        except Exception as error:
            if not (is_temporary(error) and waits(error, what, attempt)):
                raise
        attempt += 1


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
