"""The groups in configs/ and their choices, read without Hydra, whose import is too slow for `--help`."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

PACKAGE = Path(__file__).resolve().parents[1]
# In a checkout, configs/ is next to the package; in a wheel, it is inside the package.
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
CONFIG, CONFIG_DIR = "--config", "--config-dir"  # options of every command that takes overrides
OPTIONS = {CONFIG: "FILE", CONFIG_DIR: "DIR"}  # option -> placeholder for its value in messages
COMPOSITION = "train"  # name of the file in configs/ from which Hydra composes a Config
EXPERIMENT = "experiment"
OVERRIDE = "override /"  # prefix of a group in an experiment's defaults list
SWEEP = "sweep"  # the folder in configs/ with named lists of values, used only by the command `sweep`


def choices(group: str, folders: tuple[Path, ...] = ()) -> list[str]:
    """A group's choices: those in the package, and those in `folders`, which are laid out like configs/."""
    return sorted({path.stem for folder in (CONFIGS, *folders) for path in (folder / group).glob("*.yaml")})


@cache
def groups() -> list[str]:
    """The names of the groups in a run's configuration."""
    return sorted(_defaults_list(COMPOSITION))


def swept_values(name: str, folders: tuple[Path, ...] = ()) -> tuple[Path, list[str]]:
    """The file sweep/NAME.yaml in configs/ or one of `folders`, and its overrides, each with a list of values. Raises
    ValueError if the file is invalid."""
    paths = (folder / SWEEP / f"{name}.yaml" for folder in (CONFIGS, *folders))
    found = next(path for path in paths if path.exists() or path.is_symlink())
    try:
        text = found.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{found} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{found}: byte {error.start + 1} is not UTF-8") from error
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{found} is not YAML: {syntax_mistake(error, text)}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{found} has no KEY: VALUE,VALUE lines")
    return found, [f"{key}={_written(values)}" for key, values in read.items()]


def _written(values: Any) -> str:
    """`values` in Hydra's grammar: VALUE,VALUE for a YAML list."""
    if isinstance(values, list):
        return ",".join(str(each) if isinstance(each, list) else _written(each) for each in values)
    return "null" if values is None else str(values).lower() if isinstance(values, bool) else str(values)


def syntax_mistake(error: Exception, text: str) -> str:
    """`error`, raised for the YAML document `text`, as one short sentence with the number of the line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        return " ".join(str(error).split())[:200]
    line = error.problem_mark.line
    unquoted = error.problem.endswith("but got '{'") and "${" in text.splitlines()[line]
    return f"line {line + 1}: {error.problem}" + ('; write "${...}" in quotes' if unquoted else "")


@cache
def default_choices() -> dict[str, str]:
    """{group: choice} if nothing is typed, from the defaults lists in configs/."""
    listed = _defaults_list(COMPOSITION)
    overridden = _defaults_list(f"{EXPERIMENT}/{listed[EXPERIMENT]}")
    return listed | {group.removeprefix(OVERRIDE): choice for group, choice in overridden.items()}


def _defaults_list(name: str) -> dict[str, str]:
    read = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    return {group: choice for each in read["defaults"] if isinstance(each, dict) for group, choice in each.items()}
