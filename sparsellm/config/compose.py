"""Configurations from command lines, as Hydra composes them, and from files.

This is the only file that knows Hydra and OmegaConf. `configs/` holds defaults lists and the few values in which a
choice differs from the schema's defaults. An entry point is a function of one configuration:

    @entry_point(check)
    def main(config: Config) -> int: ...

Hydra refuses unknown keys and wrong types; everything found after that is collected and reported in one list.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparsellm.config.errors import ConfigError
from sparsellm.config.schema import AnalyzeConfig, Config, EvaluateConfig, SweepConfig
from sparsellm.config.values import build, fingerprint, from_dict, to_dict, unknown_keys

PACKAGE = Path(__file__).resolve().parents[1]
# In a checkout the configs stand beside the package; a wheel carries them inside it.
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"

AnyConfig = TypeVar("AnyConfig", Config, EvaluateConfig, AnalyzeConfig)

COMPOSITIONS = {Config: "train", EvaluateConfig: "evaluate", AnalyzeConfig: "analyze"}  # each to its file of configs/

for _schema, _composition in COMPOSITIONS.items():
    ConfigStore.instance().store(name=f"{_composition}_schema", node=_schema)


def entry_point(
    check: Callable[[AnyConfig], list[str]], schema: type[AnyConfig] = Config
) -> Callable[[Callable[[AnyConfig], int]], Callable[[list[str], str], int]]:
    """Make `main(config)` a command line, `main(arguments, program)`: compose a `schema`, check, call.

    `check` lists what is wrong with a configuration. The exit code: what `main` returns, or 2 for a refused
    configuration, with every mistake listed.
    """

    def decorate(main: Callable[[AnyConfig], int]) -> Callable[[list[str], str], int]:
        def command(arguments: list[str], program: str) -> int:
            try:
                if {"-m", "--multirun"} & set(arguments):
                    raise ConfigError(["--multirun runs all jobs in every rank: start a command for each"])
                config = from_overrides(arguments, schema)
                if found := check(config):
                    raise ConfigError(found)
                return main(config)
            except ConfigError as error:
                return refuse(error)

        return command

    def refuse(error: ConfigError) -> int:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"sparsellm: {error}", file=sys.stderr)
        return 2

    return decorate


def from_overrides(overrides: list[str], schema: type[AnyConfig] = Config) -> AnyConfig:
    """What a command line of these overrides gives, for scripts and tests. Raises ConfigError where Hydra refuses."""
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = compose(COMPOSITIONS[schema], overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_one_line(error)]) from error
    config, found = _typed(schema, composed, composed.hydra.runtime.choices)
    if found:
        raise ConfigError(found)
    return config


@dataclass(frozen=True)
class SweepRequest:
    """A sweep's command line, sorted by what its overrides are for."""

    sweep: SweepConfig
    axes: dict[str, list[str]]  # each key or group of a run to its overrides, one per value, in the order given
    evaluate: list[str]  # overrides for the evaluation, without the prefix


def sweep_request(overrides: list[str]) -> SweepRequest:
    """Sort a sweep's overrides, lists of values included, by Hydra's own grammar: `key=1,2`, `choice`, `range`.

    Raises ConfigError, with every mistake, for what the grammar or `SweepConfig` does not have.
    """
    options, axes, evaluate, found = OmegaConf.structured(SweepConfig), {}, [], []
    parser = OverridesParser.create()
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except HydraException as error:
            found.append(f"{text}: {_one_line(error)}")
            continue
        key, texts = override.key_or_group, [override.input_line]
        group, _, name = key.partition(".")
        if override.is_sweep_override():
            # A glob needs Hydra's search path, an interval has no list, and a shuffled list another order every time.
            listed = override.is_discrete_sweep() and override.value_type != ValueType.GLOB_CHOICE_SWEEP
            single = group in ("sweep", "evaluate")
            if not listed or getattr(override.value(), "shuffle", False) or single:
                wanted = "one value" if single else f"a list of values in order, as {key}=1,2"
                found.append(f"{text}: {key} takes {wanted}")
                continue
            texts = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if group == "sweep" and name:
            try:
                OmegaConf.update(options, name, override.value())
            except OmegaConfBaseException as error:
                found.append(f"{text}: {_one_line(error)}; sweep has {', '.join(options)}")
        elif group == "evaluate" and name:
            evaluate.append(text.removeprefix("evaluate."))
        else:
            axes[key] = texts
    if found:
        raise ConfigError(found)
    return SweepRequest(build(SweepConfig, OmegaConf.to_container(options, enum_to_str=True)), axes, evaluate)


def quoted(value: str) -> str:
    """`value` as an override spells it: in quotes where Hydra's grammar would read something else."""
    return value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "\\'") + "'"


def _typed(schema: type[AnyConfig], composed: DictConfig, choices: DictConfig) -> tuple[AnyConfig, list[str]]:
    """The `schema` that Hydra `composed` of these `choices`, a run's with `run.name` and `data.path` filled in; and as
    mistakes the keys that the schema does not have, which `+key=value` lets past Hydra, and those without a value.

    Raises ConfigError for an interpolation that leads nowhere.
    """
    composed = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
    found = []
    try:
        for key in sorted(OmegaConf.missing_keys(composed)):
            found.append(f"{key} has no value: give it one with {key}=...")
            OmegaConf.update(composed, key, OmegaConf.select(OmegaConf.structured(schema), key))
        values = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ConfigError([*found, _one_line(error)]) from error
    config = build(schema, values)
    if schema is Config:
        if config.data.path is None:
            config.data.path = f"data/{config.data.name}"
        if config.run.name is None:
            config.run.name = f"{choices.get('experiment') or 'run'}-{fingerprint(config)}"
    return config, found + unknown_keys(schema, values)


def save(config: Config, path: Path) -> None:
    """Write `config` as YAML to `path`, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(OmegaConf.to_yaml(OmegaConf.create(to_dict(config))))
    partial.replace(path)


def load(path: Path) -> Config:
    """The configuration that `save` wrote. Raises ConfigError for unknown keys."""
    return from_dict(OmegaConf.to_container(OmegaConf.load(path)))


def _one_line(error: BaseException) -> str:
    because = "" if error.__cause__ is None else f": {_one_line(error.__cause__)}"
    return " ".join(str(error).split()) + because
