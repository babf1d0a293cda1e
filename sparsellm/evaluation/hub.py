"""Models and rows on the Hugging Face hub, for a machine that may have no network.

The hub's libraries ask again and again for half a minute, for each file, before they give up. So the hub is asked once,
and where it does not answer, the libraries go on offline, with the copies that an earlier use left in their cache.
"""

from sparsellm.evaluation.locate import Checkpoint

SECONDS = 5  # for the hub's answer


def obstacle() -> str | None:
    """Why the hub cannot be asked, as a sentence; None if it answers."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # of whatever HTTP client the library uses, or its own in offline mode
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"{constants.ENDPOINT} does not answer ({reason}): only copies of its files on this machine are used"
    return None


def looking(checkpoint: Checkpoint) -> str:
    return f"{checkpoint} is no folder here: looking for a model of that name on the hub"


def unreadable(checkpoint: Checkpoint, error: Exception) -> str:
    """What is said of a checkpoint whose files cannot be read."""
    reason = " ".join(str(error).split())
    if checkpoint.folder is not None:
        return f"checkpoint={checkpoint} cannot be read: {reason}"
    return f"checkpoint={checkpoint} is no folder here, and no model of that name can be read from the hub: {reason}"
