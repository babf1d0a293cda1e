"""Configuration of every command: keys and defaults, validation rules, and command-line parsing.

The names imported here are the interface for other packages. Composition and validation are imported lazily, because
Hydra is slow to import and models need only the keys.
"""

import importlib
from typing import Any

from sparsellm.config.architecture import (
    FLOAT32,
    MOMENTS,
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
    SHORTEST_SEQUENCE,
    Activation,
    AnalyzeConfig,
    BenchmarkConfig,
    CalibrateConfig,
    Config,
    DataConfig,
    DdpCompress,
    Device,
    DistillConfig,
    Dtype,
    EvaluateConfig,
    EvaluationConfig,
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
        "calibrate_mistakes",
        "evaluate_mistakes",
        "generate_mistakes",
        "import_mistakes",
        "push_mistakes",
    ),
    "command": ("entry_point", "looked_at"),
    "compose": ("Composition", "composition", "from_overrides", "load", "name_by", "save", "typed_values"),
    "groups": ("CONFIGS",),
    "overrides": ("SweepRequest", "quoted", "sweep_request"),
    "rules": (
        "memory_mistakes",
        "mistakes",
        "prepare_mistakes",
        "ranks_that_share",
        "state_bytes",
        "takes_kernels",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"sparsellm.config.{module}"), name)
    raise AttributeError(f"module 'sparsellm.config' has no attribute {name!r}")
