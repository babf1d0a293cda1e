"""Composes configurations from command lines and reads them from files.

`configs/` holds defaults lists, which Hydra composes, and the values in which a choice differs from the schema's
defaults; --config-dir adds a folder with more choices. Typed values win; in ascending priority:

    schema defaults, choices of groups, experiment, WANDB_* variables (environment.py), groups and keys of the file of
    --config, typed groups, typed keys

If the file of --config is the config.yaml of a run, WANDB_MODE may still lower the mode of the run.
"""

import re
import warnings
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from os.path import expanduser
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparsellm.config.environment import lowered, wandb_variables
from sparsellm.config.errors import ConfigError
from sparsellm.config.groups import COMPOSITION, CONFIG, CONFIGS, EXPERIMENT, choices
from sparsellm.config.overrides import Options, Typed, accept, parse, quoted, split
from sparsellm.config.schema import CalibrateConfig, Config, DataConfig, RunConfig, Source, WandbMode
from sparsellm.config.values import (
    build,
    definition,
    fingerprint,
    flat,
    flat_types,
    from_dict,
    nested,
    to_dict,
    unknown_key,
)
from sparsellm.config.yaml_files import Start, choice_mistakes, folder_mistakes, read, read_start, seal
from sparsellm.system.files import write_whole

AnyConfig = TypeVar("AnyConfig")  # a command's configuration
Flat = dict[str, Any]  # group.key -> plain value

MODE = "logging.wandb"
WARMUP = "optimizer.warmup_steps"
WARMUP_SHARE = 10  # unless typed, the warm-up takes at most 1 / WARMUP_SHARE of the steps
NAME_PARTS = 40  # maximum characters that a run's name has for its differences from the experiment

# Plain values, because values in users' files are converted and checked like typed ones, not by OmegaConf.
ConfigStore.instance().store(name=f"{COMPOSITION}_schema", node=to_dict(Config()))


@dataclass(frozen=True)
class Composition(Generic[AnyConfig]):
    """The result of composing a command line."""

    config: AnyConfig  # composed without the refused overrides
    mistakes: list[str]  # error messages for refused overrides, with remedies
    notes: list[str]  # values that are neither typed nor defaults, and why
    choices: dict[str, str | None]  # group -> choice; None for experiment=null
    overrides: list[str]  # the command line, with each option as one string: --OPTION=VALUE

    @property
    def experiment(self) -> str | None:
        return self.choices.get(EXPERIMENT)


@overload
def composition(overrides: list[str]) -> Composition[Config]: ...


@overload
def composition(overrides: list[str], schema: type[AnyConfig]) -> Composition[AnyConfig]: ...


def composition(overrides: list[str], schema: type[Any] = Config) -> Composition[Any]:
    """Compose `schema` from the overrides and options of a command line."""
    line = _CommandLine.of(overrides, schema)
    typed, begins = line.typed, line.start
    if schema is not Config:
        keys = begins.keys | typed.keys
        if schema is CalibrateConfig and line.options.folders:
            keys["model"] = [_layer(name, line.options) for name in keys.get("model", [])]
        return Composition(build(schema, keys), line.mistakes, [], {}, line.overrides)
    values, chosen = line.layers(typed)
    # A run's config.yaml has a warm-up whether or not it was typed, so another number of steps may shorten it.
    other_steps = begins.saved and values["training.steps"] != begins.keys.get("training.steps")
    fixed = WARMUP in typed.keys or (WARMUP in begins.keys and not other_steps)
    notes = [] if fixed else _cap_warmup(values)
    config = build(Config, nested(values))
    complete(config.data, config.run, config.init_from, "data.tokenizer" in begins.keys | typed.keys)
    if config.run.name is None:
        marked = fingerprint(config)
        if marked == begins.fingerprint:
            config.run.name = begins.run
        else:
            config.run.name = line.run_name(definition(config), marked, chosen.get(EXPERIMENT), capped=bool(notes))
            if begins.run is not None:
                notes.append(f"this is another run than {begins.run}, so run.name is {config.run.name}")
    return Composition(config, line.mistakes, notes, chosen, line.overrides)


def complete(data: DataConfig, run: RunConfig, init_from: str | None, tokenizer_typed: bool = False) -> None:
    """Fill in, in place, values that are derived from other values, except the run's name."""
    # Shells do not expand the "~" in run.root=~/runs, and a folder named "~" is dangerous: `rm -r ~` removes the home.
    data.path = expanduser(data.path or f"data/{data.name}")  # noqa: PTH111 (Path's raises for unknown users)
    run.root = expanduser(run.root)  # noqa: PTH111
    if data.tokenizer is None and not tokenizer_typed and data.source != Source.stdlib_docs:
        data.tokenizer = init_from  # the model understands only the tokens of its own tokenizer


def from_values(values: Flat, schema: type[AnyConfig]) -> AnyConfig:
    """`schema` with `values`, each converted and checked like a typed one. Raises ConfigError that lists all errors."""
    return cast(AnyConfig, build(schema, nested(_accepted(values, schema))))


def _accepted(values: Flat, schema: type[Any]) -> Flat:
    typed, kinds = Typed(), flat_types(schema)
    for name, value in values.items():
        if name in kinds:
            accept(typed, name, plain := _plain(value), str(plain), kinds[name])
        else:
            typed.mistakes.append(unknown_key(name, schema))
    if typed.mistakes:
        raise ConfigError(typed.mistakes)
    return typed.keys


def _plain(value: Any) -> Any:
    """`value` as YAML would have it: an enum's name, a path's text, a list for a tuple."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _layer(name: str, options: Options) -> str:
    """A layer for `calibrate`: KxN if `name` is a choice of the group `model` in a --config-dir folder, else `name`."""
    if name in choices("model") or name not in choices("model", options.folders):
        return name
    model = from_overrides([*options.texts, f"model={name}"]).model
    return f"{model.hidden_size}x{model.intermediate_size}"


@overload
def from_overrides(overrides: list[str]) -> Config: ...


@overload
def from_overrides(overrides: list[str], schema: type[AnyConfig]) -> AnyConfig: ...


def from_overrides(overrides: list[str], schema: type[Any] = Config) -> Any:
    """The configuration for a command line's overrides. Raises ConfigError that lists every refused override."""
    composed = composition(overrides, schema)
    if composed.mistakes:
        raise ConfigError(composed.mistakes)
    return composed.config


@dataclass(frozen=True)
class _CommandLine:
    """A parsed command line, including the file given by --config."""

    options: Options
    start: Start  # the file given by --config; without keys if there is none
    typed: Typed
    mistakes: list[str]
    overrides: list[str]  # as in Composition

    @classmethod
    def of(cls, overrides: list[str], schema: type = Config) -> "_CommandLine":
        options, texts, found = split(overrides)
        for folder in options.folders:
            found += folder_mistakes(folder)
        options = replace(options, folders=tuple(folder for folder in options.folders if folder.is_dir()))
        begins = Start() if options.config is None else read_start(options.config, schema, options.folders)
        typed = parse(texts, schema, options.folders)
        found += begins.mistakes + typed.mistakes
        for each in (begins, typed):
            for group, choice in list(each.groups.items()):
                if choice is not None and (wrong := choice_mistakes(group, choice, options.folders)):
                    found += wrong
                    del each.groups[group]
        if begins.saved and (choice := typed.groups.pop(EXPERIMENT, None)) is not None:
            found.append(
                f"{EXPERIMENT}={choice} with {CONFIG}={options.config}, which has a value for every key of an"
                " experiment: leave out one of them"
            )
        return cls(options, begins, typed, found, [*options.texts, *texts])

    def layers(self, typed: Typed) -> tuple[Flat, dict[str, str | None]]:
        """The values of all layers combined with those in `typed`, and the choice of every group. An experiment
        overrides other groups."""
        groups = self.start.groups | typed.groups
        if self.start.saved:
            groups[EXPERIMENT] = None
        overrides = [f"~{group}" if choice is None else f"{group}={quoted(choice)}" for group, choice in groups.items()]
        values, chosen = self.hydra(COMPOSITION, *overrides)
        variables = {f"logging.{key}": each.value for key, each in wandb_variables().items() if each.mistake is None}
        if self.start.saved:  # the run may be older than some keys
            values = flat(to_dict(Config())) | variables | self.start.keys
            values[MODE] = lowered(WandbMode[values[MODE]]).name
            return values | self.values(typed), chosen
        return values | variables | self.values(self.start) | self.values(typed), chosen

    def values(self, typed: Typed) -> Flat:
        """The values that `typed` sets explicitly, through groups (except the experiment) and keys."""
        values: Flat = {}
        for group, choice in typed.groups.items():
            if group != EXPERIMENT and choice is not None:
                values |= self.hydra(f"{group}/{choice}")[0]
        return values | typed.keys

    def hydra(self, name: str, *overrides: str) -> tuple[Flat, dict[str, str | None]]:
        """The values in the file NAME.yaml of a configuration folder, including the file's defaults list, and the
        choice of every group. Raises ConfigError for files in --config-dir that Hydra refuses."""
        # Hydra looks for the file itself in the first folder only, and for its defaults list in all folders.
        own = [folder for folder in self.options.folders if (folder / f"{name}.yaml").is_file()]
        if not own and (name != COMPOSITION or not self.options.folders):
            return _shipped(name, *overrides)
        first, *others = dict.fromkeys((*own, CONFIGS, *self.options.folders))
        path = ",".join(quoted(f"file://{folder.absolute()}") for folder in others)
        try:
            return _hydra(name, f"hydra.searchpath=[{path}]", *overrides, first=first)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError([f"{self.options.texts[-1]}: {' '.join(str(error).split())}"]) from error

    def run_name(self, values: Flat, fingerprint: str, experiment: str | None, capped: bool) -> str:
        """A name such as EXPERIMENT-relu-steps_800-3f2a91c0: the differences from the experiment, or from the file
        given by --config, and `fingerprint`."""
        alone, with_groups = (
            definition(build(Config, nested(self.layers(Typed(groups))[0])))
            for groups in ({EXPERIMENT: experiment}, self.typed.groups)
        )
        groups, keys = [], []
        for key, value in values.items():
            group, _, last = key.partition(".")
            if value == alone[key] or (capped and key == WARMUP):
                continue
            if group in self.typed.groups and value == with_groups[key]:
                groups.append(str(self.typed.groups[group]))
            else:
                keys.append((last or group, value))
        return _joined(self.start.title or experiment, groups, keys, fingerprint)


def typed_values(overrides: list[str]) -> Flat:
    """The values written by a person, through groups (except the experiment) and keys: on the command line, or in a
    --config file that was not saved by a run."""
    line = _CommandLine.of(overrides)
    return ({} if line.start.saved else line.values(line.start)) | line.values(line.typed)


def _hydra(name: str, *overrides: str, first: Path = CONFIGS) -> tuple[Flat, dict[str, str | None]]:
    with warnings.catch_warnings(), initialize_config_dir(str(first.absolute()), version_base="1.3"):
        warnings.simplefilter("ignore", UserWarning)  # `_self_` may be left out: a file's own values win
        composed = compose(name, overrides=list(overrides), return_hydra_config=True)
    chosen = {group: choice for group, choice in composed.hydra.runtime.choices.items() if "/" not in group}
    values = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    return _accepted(flat(cast(Flat, OmegaConf.to_container(values))), Config), chosen


_shipped = lru_cache(maxsize=128)(_hydra)


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


def name_by(swept: list[str], values: Flat, fingerprint: str, choices: dict[str, str | None]) -> str:
    """The name of a sweep's run, such as EXPERIMENT-relu-seed_1-3f2a91c0: the run's values for the keys and groups in
    `swept`, in the schema's order. `values` must have every key, and `choices` every group."""
    keys = [(key.rpartition(".")[2], value) for key, value in values.items() if key in swept]
    groups = [str(choices[group]) for group in sorted(choices) if group in swept and group != EXPERIMENT]
    return _joined(choices.get(EXPERIMENT), groups, keys, fingerprint)


def _joined(experiment: str | None, groups: list[str], keys: list[tuple[str, Any]], fingerprint: str) -> str:
    parts, shown = list(groups), list[str]()
    for key, value in keys:
        spelled = f"{value:g}".replace("+", "") if isinstance(value, float) else str(value).lower()
        if re.fullmatch(r"[\w.-]{1,20}", spelled, re.ASCII):  # leaves out paths and lists
            parts.append(f"{key}_{spelled}")
    for part in dict.fromkeys(parts):
        if len("-".join([*shown, part])) <= NAME_PARTS:
            shown.append(part)
    return "-".join([experiment or "run", *shown, fingerprint])


def save(config: AnyConfig, path: Path) -> None:
    """Write `config` as YAML to `path` atomically, with a checksum in the first line."""
    text = as_yaml(config)
    write_whole(path, seal(text) + text)


def as_yaml(config: AnyConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def load(path: Path) -> Config:
    """The configuration in a file written by `save`; the checksum line may be missing. Raises ConfigError if the file
    is damaged."""
    damaged = f"{path} is damaged ({{}}): restore it from a copy, or remove it"
    try:
        values, _ = read(path)
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror}"]) from error
    except ValueError as error:
        raise ConfigError([damaged.format(error)]) from None
    try:
        return from_dict(values)
    except ConfigError as error:
        raise ConfigError([f"{path} is not a configuration of this version: {'; '.join(error.mistakes)}"]) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError([damaged.format(f"a value is invalid: {error}")]) from None
