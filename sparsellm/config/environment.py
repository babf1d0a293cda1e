"""Environment variables of Weights & Biases that set keys in the group `logging`, unless these keys are typed or set in
the file of --config."""

import os
from typing import Any, NamedTuple

from sparsellm.config.schema import LONGEST_TAG, WandbMode

# key of `logging` -> variable that sets it. WANDB_DISABLED=true overrides WANDB_MODE.
VARIABLES = {
    "wandb": "WANDB_MODE", "wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY",
    "wandb_group": "WANDB_RUN_GROUP", "wandb_tags": "WANDB_TAGS", "wandb_notes": "WANDB_NOTES",
}  # fmt: skip
DISABLED = "WANDB_DISABLED"
MODES = {
    "online": WandbMode.online, "run": WandbMode.online, "shared": WandbMode.online, "offline": WandbMode.offline,
    "dryrun": WandbMode.offline, "disabled": WandbMode.disabled,
}  # fmt: skip


class Variable(NamedTuple):
    """An environment variable with a value."""

    name: str
    text: str
    value: Any  # the value for the key of `logging`
    mistake: str | None = None  # what `text` should be, if it is invalid and therefore ignored


def wandb_variables() -> dict[str, Variable]:
    """The environment variables that are set, by the key of `logging` that they set."""
    found = {}
    for key, name in VARIABLES.items():
        if text := os.environ.get(name, "").strip():
            found[key] = _variable(key, name, text)
    if (text := os.environ.get(DISABLED, "").strip()).lower() in ("1", "true", "yes", "on"):
        found["wandb"] = Variable(DISABLED, text, WandbMode.disabled.name)
    return found


def lowered(mode: WandbMode) -> WandbMode:
    """The mode of a run, or the mode of the environment if it records less. The variable is set for this machine, which
    may be offline. It can only restrict the run's mode."""
    variable = wandb_variables().get("wandb")
    if variable is None or variable.mistake is not None:
        return mode
    return max(mode, WandbMode[variable.value], key=list(WandbMode).index)


def _variable(key: str, name: str, text: str) -> Variable:
    if key == "wandb":
        mode = MODES.get(text.lower())
        return Variable(name, text, mode and mode.name, None if mode else "online, offline or disabled")
    if "${" in text:
        return Variable(name, text, None, "text without interpolations")
    tags = [tag.strip() for tag in text.split(",") if tag.strip()]
    if "???" in (tags if key == "wandb_tags" else [text]):  # OmegaConf reads ??? as a missing value
        return Variable(name, text, None, "another text than ???")
    if key != "wandb_tags":
        return Variable(name, text, text)
    mistake = f"tags of at most {LONGEST_TAG} characters" if max(map(len, tags), default=0) > LONGEST_TAG else None
    return Variable(name, text, tags, mistake)
