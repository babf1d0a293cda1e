"""Converts a configuration to plain values and back, and selects the values that define a run."""

import difflib
import hashlib
import json
import types
import typing
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from sparsellm.config.errors import ConfigError
from sparsellm.config.schema import Config

# Groups and keys that may differ between two starts of the same run. Data may move: a checksum identifies the tokens.
FREE_GROUPS = ("runtime", "logging", "evaluation", "run")
FREE_KEYS = ("data.path", "data.verify", "data.skip_bad_records", "training.stop_on_divergence")
# Keys and groups that are newer than some runs. `fingerprint` ignores their default values, so runs keep their names.
ADDED_KEYS = (
    "optimizer.schedule", "optimizer.decay_fraction", "optimizer.muon",
    "data.mix", "sparsity.reinit_blend", "model.num_key_value_heads",
    "model.head_dim", "model.attention_bias", "model.qk_norm", "model.tie_embeddings", "model.rope_parameters",
    "init_from", "sparsity.relu_tokens", "distill", "data.revision",
)  # fmt: skip

# Names that other frameworks use for keys; error messages suggest the names used here.
OTHER_NAMES = {
    "lr": ["optimizer.learning_rate"], "max_lr": ["optimizer.learning_rate"],
    "min_lr": ["optimizer.final_lr_fraction"], "lr_schedule": ["optimizer.schedule"],
    "lr_scheduler_type": ["optimizer.schedule"], "wd": ["optimizer.weight_decay"],
    "betas": ["optimizer.beta1", "optimizer.beta2"], "adam_beta1": ["optimizer.beta1"],
    "adam_beta2": ["optimizer.beta2"], "max_grad_norm": ["optimizer.grad_clip"], "warmup": ["optimizer.warmup_steps"],
    "epochs": ["training.steps"], "num_train_epochs": ["training.steps"], "max_steps": ["training.steps"],
    "max_iters": ["training.steps"], "train_steps": ["training.steps"], "global_batch_size": ["training.batch_size"],
    "seq_len": ["training.sequence_length"], "block_size": ["training.sequence_length"],
    "max_seq_len": ["training.sequence_length"], "per_device_train_batch_size": ["runtime.micro_batch_size"],
    "dtype": ["runtime.precision"], "bf16": ["runtime.precision"], "gradient_checkpointing": ["runtime.recompute"],
    "activation_checkpointing": ["runtime.recompute"], "fsdp": ["runtime.shard"],
    "num_workers": ["runtime.data_workers"], "eval_interval": ["logging.validation_every"],
    "log_interval": ["logging.every"], "save_interval": ["run.checkpoint_every"],
    "save_steps": ["run.checkpoint_every"], "output_dir": ["run.root"],
    "resume": ["run.restart"], "l1": ["sparsity.l1_coefficient"], "n_layer": ["model.num_layers"],
    "n_head": ["model.num_heads"], "n_embd": ["model.hidden_size"], "d_model": ["model.hidden_size"],
    "d_ff": ["model.intermediate_size"], "max_new_tokens": ["tokens"], "max_tokens": ["tokens"],
}  # fmt: skip


def to_dict(config: Any) -> dict[str, Any]:
    """Converts a configuration to nested plain values, with enums by name, as stored in config.yaml and checkpoints."""
    return asdict(config, dict_factory=lambda items: {k: v.name if isinstance(v, Enum) else v for k, v in items})


def from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `to_dict`. Raises ConfigError for unknown keys."""
    if unknown := flat(values).keys() - flat_types(Config).keys():
        raise ConfigError([unknown_key(name, Config) for name in sorted(unknown)])
    return build(Config, values)


def definition(config: Config) -> dict[str, Any]:
    """The values that define a run, by `group.key`: all starts of the run must agree on these values."""
    found = flat({group: values for group, values in to_dict(config).items() if group not in FREE_GROUPS})
    # The data.mix folders may move too, but must keep their names.
    found["data.mix"] = [{**source, "data": Path(str(source.get("data"))).name} for source in found["data.mix"]]
    return {key: value for key, value in found.items() if key not in FREE_KEYS}


def fingerprint(config: Config) -> str:
    """8 hex digits that identify `definition(config)`, for the run's name. With init_from, model.* does not count,
    because the name is needed before the init_from model is read."""
    defaults = definition(Config())
    counted = {k: v for k, v in definition(config).items() if not k.startswith(ADDED_KEYS) or v != defaults[k]}
    if config.init_from is not None:
        counted = {key: value for key, value in counted.items() if not key.startswith("model.")}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:8]


def flat_types(schema: type, prefix: str = "") -> dict[str, Any]:
    """The type of every `group.key` of `schema`."""
    found: dict[str, Any] = {}
    for each in fields(schema):
        name, kind = f"{prefix}{each.name}", each.type
        found |= flat_types(kind, f"{name}.") if isinstance(kind, type) and is_dataclass(kind) else {name: kind}
    return found


def flat(values: dict[str, Any], prefix: str = "", between: str = ".") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, with `between` between the keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}{between}", between) if isinstance(value, dict) else {name: value}
    return found


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *path, key = name.split(".")
        inside = found
        for part in path:
            inside = inside.setdefault(part, {})
        inside[key] = value
    return found


def unknown_key(name: str, schema: type) -> str:
    """The error message for a `name` that is not a key of `schema`; suggests keys with similar names."""
    keys, group = flat_types(schema), schema
    path: list[str] = []
    for part in name.split("."):  # the innermost group that exists
        inside: Any = next((f.type for f in fields(group) if f.name == part and is_dataclass(f.type)), None)
        if inside is None:
            break
        group, path = inside, [*path, part]
    listed = ", ".join(f.name for f in fields(group))
    if ".".join(path) == name:
        return f"{name} is a group of keys: write {name}.KEY=VALUE; it has {listed}"
    last = name.rpartition(".")[2]
    if set(meant := OTHER_NAMES.get(last, [""])) <= keys.keys():
        return f"{name} is not a key: did you mean {' and '.join(meant)}?"
    ends = {key.rpartition(".")[2]: key for key in keys}
    close = [key for key in keys if key.rpartition(".")[2] == last]
    close = close or difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
    close = close or [ends[end] for end in difflib.get_close_matches(last, ends, n=1, cutoff=0.75)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    where = f"{'.'.join(path)} has" if path else "there are"
    return f"{name} is not a key: {hint}{where} {listed}"


def build(schema: type, values: dict[str, Any]) -> Any:
    """An instance of `schema` with the nested plain `values`; missing keys get their defaults."""

    def convert(kind: Any, value: Any) -> Any:
        if isinstance(kind, type) and is_dataclass(kind):
            return build(kind, value)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind[value]
        if value is not None and isinstance(kind, types.UnionType):
            return convert(next(k for k in typing.get_args(kind) if k is not type(None)), value)
        return float(value) if kind is float else value

    return schema(**{f.name: convert(f.type, values[f.name]) for f in fields(schema) if f.name in values})
