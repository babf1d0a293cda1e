"""Configuration of every command: keys and defaults, validation rules, and command-line parsing.

Other packages import from here: every public name in the modules below, and the names in `_LATER`, whose modules are
imported on first use, because they import Hydra, which is slow.
"""

import importlib
from typing import Any

from sparsellm.config.architecture import *
from sparsellm.config.checkpoint_rules import *
from sparsellm.config.environment import lowered, wandb_variables
from sparsellm.config.errors import ConfigError
from sparsellm.config.groups import CONFIG, CONFIG_DIR
from sparsellm.config.rules import *
from sparsellm.config.schema import *
from sparsellm.config.values import definition, fingerprint, from_dict, to_dict

_LATER = {
    "command": ("entry_point", "looked_at"),
    "compose": ("Composition", "composition", "from_overrides", "load", "name_by", "save", "typed_values"),
    "overrides": ("SweepRequest", "quoted", "sweep_request"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"sparsellm.config.{module}"), name)
    raise AttributeError(f"module 'sparsellm.config' has no attribute {name!r}")
