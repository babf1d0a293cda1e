"""Composes configurations from command lines and reads them from files.

`configs/` holds defaults lists, which Hydra composes, and the values in which a choice differs from the schema's
defaults. Typed values win; in ascending priority:

    schema defaults, choices of groups, experiment, WANDB_* variables (environment.py), typed groups, typed keys
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from os.path import expanduser
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast, overload

import xxhash
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from sparsellm.config.environment import wandb_variables
from sparsellm.config.errors import ConfigError
from sparsellm.config.groups import COMPOSITION, CONFIGS, EXPERIMENT
from sparsellm.config.overrides import Typed, parse
from sparsellm.config.schema import Config, Source
from sparsellm.config.values import build, definition, fingerprint, flat, from_dict, nested, to_dict
from sparsellm.system import regular
from sparsellm.system.files import write_whole

AnyConfig = TypeVar("AnyConfig")  # the configuration of a command
Flat = dict[str, Any]  # group.key -> plain value

LARGEST, DEEPEST = 1_000_000, 16  # limits of a config.yaml: characters, and nesting depth
SEAL = "# checksum xxh3_64 "  # the first line of a config.yaml starts with SEAL
WARMUP = "optimizer.warmup_steps"
WARMUP_SHARE = 10  # unless typed, the warm-up takes at most 1 / WARMUP_SHARE of the steps
NAME_PARTS = 40  # maximum characters of the differences from the experiment in a run's name

ConfigStore.instance().store(name=f"{COMPOSITION}_schema", node=Config)


@dataclass(frozen=True)
class Composition(Generic[AnyConfig]):
    """The result of composing a command line."""

    config: AnyConfig  # composed without the refused overrides
    mistakes: list[str]  # refused overrides, each with its remedy
    notes: list[str]  # values that are neither typed nor defaults, and why
    choices: dict[str, str | None]  # choice of every group; None for experiment=null

    @property
    def experiment(self) -> str | None:
        return self.choices.get(EXPERIMENT)


@overload
def composition(overrides: list[str]) -> Composition[Config]: ...


@overload
def composition(overrides: list[str], schema: type[AnyConfig]) -> Composition[AnyConfig]: ...


def composition(overrides: list[str], schema: type[Any] = Config) -> Composition[Any]:
    """Compose `schema` from the overrides of a command line."""
    typed = parse(overrides, schema)
    if schema is not Config:
        return Composition(build(schema, typed.keys), typed.mistakes, [], {})
    values, chosen = _layers(typed)
    notes = [] if WARMUP in typed.keys else _cap_warmup(values)
    config = build(Config, nested(values))
    if config.data.path is None:
        config.data.path = f"data/{config.data.name}"
    # Shells do not expand the "~" in run.root=~/runs, and a folder named "~" is dangerous: `rm -r ~` removes the home.
    config.data.path = expanduser(config.data.path)  # noqa: PTH111 (Path's raises for unknown users)
    config.run.root = expanduser(config.run.root)  # noqa: PTH111
    data = config.data
    if data.tokenizer is None and "data.tokenizer" not in typed.keys and data.source != Source.stdlib_docs:
        data.tokenizer = config.init_from  # the model understands only the tokens of its own tokenizer
    if config.run.name is None:
        values, marked = definition(config), fingerprint(config)
        config.run.name = _run_name(values, marked, typed, chosen.get(EXPERIMENT), capped=bool(notes))
    return Composition(config, typed.mistakes, notes, chosen)


@overload
def from_overrides(overrides: list[str]) -> Config: ...


@overload
def from_overrides(overrides: list[str], schema: type[AnyConfig]) -> AnyConfig: ...


def from_overrides(overrides: list[str], schema: type[Any] = Config) -> Any:
    """The configuration for the overrides of a command line. Raises ConfigError with every refused override."""
    composed = composition(overrides, schema)
    if composed.mistakes:
        raise ConfigError(composed.mistakes)
    return composed.config


def _layers(typed: Typed) -> tuple[Flat, dict[str, str | None]]:
    """The values of all layers combined, and the choice of every group. An experiment overrides other groups."""
    variables = {f"logging.{key}": each.value for key, each in wandb_variables().items() if each.mistake is None}
    overrides = [f"~{group}" if choice is None else f"{group}={choice}" for group, choice in typed.groups.items()]
    values, chosen = _hydra(COMPOSITION, *overrides)
    return values | variables | _typed_values(typed), chosen


def typed_values(overrides: list[str]) -> Flat:
    """The values that a command line sets itself, by groups (except the experiment) and by keys."""
    return _typed_values(parse(overrides))


def _typed_values(typed: Typed) -> Flat:
    values: Flat = {}
    for group, choice in typed.groups.items():
        if group != EXPERIMENT and choice is not None:
            values |= _hydra(f"{group}/{choice}")[0]
    return values | typed.keys


@lru_cache(maxsize=128)
def _hydra(name: str, *overrides: str) -> tuple[Flat, dict[str, str | None]]:
    """The values of the file `name` of configs/ with its defaults list, and the choice of every group."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = compose(name, overrides=list(overrides), return_hydra_config=True)
    chosen = {group: choice for group, choice in composed.hydra.runtime.choices.items() if "/" not in group}
    values = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    return flat(cast(Flat, OmegaConf.to_container(values, resolve=True, enum_to_str=True))), chosen


def _cap_warmup(values: Flat) -> list[str]:
    """Shorten a warm-up that is too long for the run, and return a note that says so."""
    longest, before = max(0, values["training.steps"] // WARMUP_SHARE), values[WARMUP]
    if before <= longest:
        return []
    values[WARMUP] = longest
    return [
        f"{WARMUP} is {longest} instead of {before}, a tenth of training.steps={values['training.steps']}; set another"
        f" one with {WARMUP}=N"
    ]


def _run_name(values: Flat, fingerprint: str, typed: Typed, experiment: str | None, capped: bool) -> str:
    """A name such as EXPERIMENT-relu-steps_800-3f2a91c0: the differences from the experiment, and `fingerprint`."""
    alone, with_groups = (
        definition(build(Config, nested(_layers(Typed(groups))[0])))
        for groups in ({EXPERIMENT: experiment}, typed.groups)
    )
    groups, keys = [], []
    for key, value in values.items():
        group, _, last = key.partition(".")
        if value == alone[key] or (capped and key == WARMUP):
            continue
        if group in typed.groups and value == with_groups[key]:
            groups.append(str(typed.groups[group]))
        else:
            keys.append((last or group, value))
    return _joined(experiment, groups, keys, fingerprint)


def name_by(swept: list[str], values: Flat, fingerprint: str, choices: dict[str, str | None]) -> str:
    """The name of a sweep's run, such as EXPERIMENT-relu-seed_1-3f2a91c0: its values of the keys and groups that are
    `swept`, in the schema's order. `values` has every key, and `choices` every group."""
    keys = [(key.rpartition(".")[2], value) for key, value in values.items() if key in swept]
    groups = [str(choices[group]) for group in sorted(choices) if group in swept and group != EXPERIMENT]
    return _joined(choices.get(EXPERIMENT), groups, keys, fingerprint)


def _joined(experiment: str | None, groups: list[str], keys: list[tuple[str, Any]], fingerprint: str) -> str:
    parts, shown = list(groups), list[str]()
    for key, value in keys:
        spelled = f"{value:g}".replace("+", "") if isinstance(value, float) else str(value).lower()
        if re.fullmatch(r"[\w.-]{1,20}", spelled, re.ASCII):  # not paths and lists
            parts.append(f"{key}_{spelled}")
    for part in dict.fromkeys(parts):
        if len("-".join([*shown, part])) <= NAME_PARTS:
            shown.append(part)
    return "-".join([experiment or "run", *shown, fingerprint])


def save(config: AnyConfig, path: Path) -> None:
    """Write `config` as YAML to `path` atomically, with a checksum in the first line."""
    text = as_yaml(config)
    write_whole(path, _seal(text) + text)


def _seal(text: str) -> str:
    return f"{SEAL}{xxhash.xxh3_64_hexdigest(text.encode())} of the lines below\n"


def as_yaml(config: AnyConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def _bomb(text: str) -> str | None:
    """Why `text` is refused before parsing: aliases or deep nesting, which can take unlimited time or memory."""
    depth = 0
    for token in yaml.scan(text, yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            return "it has aliases (*NAME), which saved configurations never have"
        kind = type(token).__name__
        depth += kind.endswith("StartToken") - kind.endswith("EndToken")
        if depth > DEEPEST:
            return f"its values are nested more than {DEEPEST} levels deep"
    return None


def load(path: Path) -> Config:
    """The configuration that `save` wrote; the line with the checksum may be missing. Raises ConfigError."""

    def refuse(why: str) -> NoReturn:
        raise ConfigError([f"{path} is damaged ({why}): restore it from a copy, or remove it"]) from None

    try:
        text = regular.content(path).decode()
    except UnicodeDecodeError as error:
        refuse(f"byte {error.start + 1} is not UTF-8")
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror}"]) from error
    first, _, rest = text.partition("\n")
    if SEAL in text and f"{first}\n" != _seal(rest):
        refuse("its checksum does not match; remove the first line if the change is intended")
    if len(text) > LARGEST:
        refuse(f"it has {len(text):,} characters: a configuration has at most {LARGEST:,}")
    try:
        if (why := _bomb(text)) is not None:
            refuse(why)
        values = OmegaConf.to_container(OmegaConf.create(text))
    except ConfigError:
        raise
    except Exception as error:  # YAML and OmegaConf raise many kinds of exceptions for odd content
        refuse(f"it is not YAML: {' '.join(str(error).split())[:200]}")
    if not isinstance(values, dict) or not values:
        refuse("it contains no keys")
    try:
        return from_dict(cast(dict[str, Any], values))
    except ConfigError as error:
        raise ConfigError([f"{path} is not a configuration of this version: {'; '.join(error.mistakes)}"]) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        refuse(f"a value is invalid: {error}")
