"""The configuration of every command: its keys and defaults, the rules that values must keep, and command lines.

What composes and checks (Hydra, torch) is imported when it is first asked for: models need only the keys.
"""

import importlib
from typing import Any

from sparsellm.config.architecture import (
    ROPE_KEYS,
    ModelConfig,
    RopeParameters,
    RopeType,
    attention_weights,
    embedding_weights,
    parameters,
)
from sparsellm.config.errors import ConfigError
from sparsellm.config.model_rules import architecture_mistakes
from sparsellm.config.schema import (
    MIX_PERIOD,
    Activation,
    AnalyzeConfig,
    BenchmarkConfig,
    Config,
    DataConfig,
    DdpCompress,
    Device,
    Dtype,
    EvaluateConfig,
    GenerateConfig,
    ImportConfig,
    Kernels,
    L1Normalization,
    L1Schedule,
    LoggingConfig,
    OptimizerConfig,
    Precision,
    PushConfig,
    RunConfig,
    RuntimeConfig,
    Schedule,
    Shard,
    Source,
    SparsityConfig,
    SweepConfig,
    SweepMode,
    TrainingConfig,
    WandbMode,
    decay_start,
    l1_coefficient_as,
    l1_denominator,
)
from sparsellm.config.values import definition, fingerprint, from_dict, to_dict

_LATER = {
    "checkpoint_rules": (
        "analyze_mistakes",
        "benchmark_mistakes",
        "evaluate_mistakes",
        "generate_mistakes",
        "import_mistakes",
        "push_mistakes",
    ),
    "command": ("entry_point",),
    "compose": ("composition", "from_overrides", "load", "save", "typed_values"),
    "overrides": ("CONFIGS", "SweepRequest", "quoted", "sweep_request"),
    "rules": (
        "memory_mistakes",
        "mistakes",
        "prepare_mistakes",
        "ranks_that_share",
        "state_bytes",
        "takes_kernels",
    ),
}

__all__ = [
    "CONFIGS",
    "MIX_PERIOD",
    "ROPE_KEYS",
    "Activation",
    "AnalyzeConfig",
    "BenchmarkConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DdpCompress",
    "Device",
    "Dtype",
    "EvaluateConfig",
    "GenerateConfig",
    "ImportConfig",
    "Kernels",
    "L1Normalization",
    "L1Schedule",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Precision",
    "PushConfig",
    "RopeParameters",
    "RopeType",
    "RunConfig",
    "RuntimeConfig",
    "Schedule",
    "Shard",
    "Source",
    "SparsityConfig",
    "SweepConfig",
    "SweepMode",
    "SweepRequest",
    "TrainingConfig",
    "WandbMode",
    "analyze_mistakes",
    "architecture_mistakes",
    "attention_weights",
    "benchmark_mistakes",
    "composition",
    "decay_start",
    "definition",
    "embedding_weights",
    "entry_point",
    "evaluate_mistakes",
    "fingerprint",
    "from_dict",
    "from_overrides",
    "generate_mistakes",
    "import_mistakes",
    "l1_coefficient_as",
    "l1_denominator",
    "load",
    "memory_mistakes",
    "mistakes",
    "parameters",
    "prepare_mistakes",
    "push_mistakes",
    "quoted",
    "ranks_that_share",
    "save",
    "state_bytes",
    "sweep_request",
    "takes_kernels",
    "to_dict",
    "typed_values",
]


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"sparsellm.config.{module}"), name)
    raise AttributeError(f"module 'sparsellm.config' has no attribute {name!r}")
