"""Reads YAML files: a run's config.yaml, the file given by --config, and choices in --config-dir.

Each value is converted and checked like a typed one, and each error message names the file.
"""

import difflib
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from sparsellm.config.groups import CONFIG, CONFIG_DIR, CONFIGS, EXPERIMENT, OVERRIDE, SWEEP, groups
from sparsellm.config.overrides import Typed, accept, choose, mapping, unknown
from sparsellm.config.schema import Config, Verbatim
from sparsellm.config.values import build, fingerprint, flat, flat_types, nested
from sparsellm.system import regular

SEAL = "# checksum xxh3_64 "  # start of the first line in a config.yaml written by `save`
GLOBAL = "_global_"  # Hydra package of experiments, which may set keys in all groups
LONGEST_TITLE = 80  # maximum characters


def seal(text: str) -> str:
    return f"{SEAL}{xxhash.xxh3_64_hexdigest(text.encode())} of the lines below\n"


def read(path: Path) -> tuple[dict[str, Any], bool]:
    """The values in a YAML file, and whether the file was written by `save`. Raises OSError if the file cannot be read,
    and ValueError, saying why, if it is refused."""
    try:
        text = regular.content(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error
    first, _, rest = text.partition("\n")
    saved = SEAL in text
    if saved and f"{first}\n" != seal(rest):
        raise ValueError("its checksum does not match; remove the first line if the change is intended")
    return mapping(text), saved


@dataclass
class Start(Typed):
    """The values in the file given by --config, on which the command line builds."""

    title: str = ""  # the first part of the names of runs that use the file
    saved: bool = False  # whether a run saved the file, which then has every key
    run: str | None = None  # the name of the run that saved the file
    fingerprint: str | None = None  # the fingerprint of the run that saved the file


def read_start(path: Path, schema: type, folders: tuple[Path, ...] = ()) -> Start:
    """Read the file given by --config. `folders`: as in Options."""
    found = Start(title=re.sub(r"[^\w.-]+", "_", path.stem, flags=re.ASCII)[:LONGEST_TITLE])
    inside, wanted = path / "config.yaml", "give a YAML file, such as runs/NAME/config.yaml"
    if path.is_dir():
        hint = f"did you mean {inside}?" if inside.is_file() else wanted
        found.mistakes = [f"{CONFIG}={path} is a folder: {hint}"]
        return found
    try:
        values, found.saved = read(path)
    except OSError as error:
        found.mistakes = [f"{CONFIG}={path} cannot be read ({error.strerror}): {wanted}"]
        return found
    except ValueError as error:
        found.mistakes = [f"{CONFIG}={path} cannot be used ({error}): correct it, or give another file"]
        return found
    if schema is not Config and {"model", "training"} <= values.keys():
        found.mistakes = [f"{path} is the configuration of a run: it should set {', '.join(flat_types(schema))}"]
        return found
    if "defaults" in values:
        found.mistakes.append(
            f"{path}: defaults is not a key: write each choice as GROUP: CHOICE, or make the file an experiment,"
            f" DIR/{EXPERIMENT}/NAME.yaml, and give {CONFIG_DIR} DIR"
        )
        del values["defaults"]
    values = flat(values) if schema is Config else values
    for group in groups() if schema is Config else ():
        if group in values:
            chosen, choice = Typed(found.groups), values.pop(group)
            choose(chosen, group, "null" if choice is None else str(choice), folders)
            found.mistakes += [f"{path}: {mistake}" for mistake in chosen.mistakes]
    _add(found, path, values, schema)
    found.saved &= schema is Config and not found.mistakes
    if found.saved:
        _drop_derived(found)
    return found


def _add(found: Typed, path: Path, values: dict[str, Any], schema: type) -> None:
    """Add `values`, {group.key: value} from the file `path`, to `found`, with error messages for invalid values."""
    kinds, added = flat_types(schema), Typed(found.groups, found.keys)
    for name, value in ((str(name), value) for name, value in values.items()):
        written = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        if schema is Config and name in groups() and isinstance(value, str):
            line = f"`- {OVERRIDE}{name}: {written}`"
            added.mistakes.append(f"{name} is {written}: write choices in the list `defaults`, as {line}")
        elif name not in kinds:
            added.mistakes.append(unknown(name, written, schema))
        elif Verbatim in typing.get_args(kinds[name]):
            added.keys[name] = written
        else:
            accept(added, name, value, _with_quotes(value) or written, kinds[name])
    found.mistakes += [f"{path}: {mistake}" for mistake in added.mistakes]


def _with_quotes(value: Any) -> str | None:
    """`value` in quotes if it is text that would not be text without quotes, such as "8". A message that says that 8
    should be a number would be puzzling."""
    try:
        bare = mapping(f"x: {value}")["x"] if isinstance(value, str) else value
    except ValueError:
        return None
    return repr(value) if type(bare) is not type(value) else None


def _drop_derived(found: Start) -> None:
    """Drop values that a run recorded although nobody typed them, so that new overrides derive new ones."""
    found.fingerprint = fingerprint(build(Config, nested(found.keys)))
    found.run = found.keys.pop("run.name", None)
    found.title = re.sub(r"-[0-9a-f]{8}$", "", found.run or found.title)[:LONGEST_TITLE]
    found.keys.pop("run.restart", None)
    if found.keys.get("data.path") == f"data/{found.keys.get('data.name')}":
        del found.keys["data.path"]
    if found.keys.get("data.tokenizer") == found.keys.get("init_from"):
        found.keys.pop("data.tokenizer", None)


def folder_mistakes(folder: Path) -> list[str]:
    """Error messages about the folder given by --config-dir, except about the contents of its files."""
    known = (*groups(), SWEEP)
    layout = f"it should hold files GROUP/CHOICE.yaml, where GROUP is one of {', '.join(known)}"
    if not folder.is_dir():
        return [f"{CONFIG_DIR}={folder} is not a folder: {layout}"]
    found, own = [], sorted(folder.glob("*/*.yaml"))
    for path in sorted(folder.glob("*/*.yml")):
        if path.parent.name in known:
            found.append(f"{path} ends in .yml: it should end in .yaml")
    for name in dict.fromkeys(path.parent.name for path in own):
        if name not in known and (close := difflib.get_close_matches(name, known, n=1)):
            found.append(f"{folder / name} is not a group: did you mean {folder / close[0]}?")
    if not found and not any(path.parent.name in known for path in own):
        return [f"{CONFIG_DIR}={folder} has no choices: {layout}"]
    return found + [
        f"{path} has the name of a choice of this package: rename the file"
        for path in own
        if path.parent.name in known and (CONFIGS / path.parent.name / path.name).exists()
    ]


def choice_mistakes(group: str, choice: str, folders: tuple[Path, ...], within: tuple[str, ...] = ()) -> list[str]:
    """Error messages about the file for `choice` in `folders`, and about the files named in its defaults list.

    `within`: the choices of `group` whose defaults lists led to this choice."""
    path = next((path for folder in folders if (path := folder / group / f"{choice}.yaml").is_file()), None)
    if path is None:
        return []
    try:
        values, _ = read(path)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror}): ask its owner for permission"]
    except ValueError as error:
        return [f"{path} cannot be used ({error}): correct it"]
    found = Typed()
    header = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    if group == EXPERIMENT and (header is None or header[1] != GLOBAL):
        found.mistakes.append(f"{path}: the first line should be `# @package {GLOBAL}`, so that keys have no prefix")
    elif group != EXPERIMENT and header is not None:
        found.mistakes.append(f"{path}: remove the line `{header[0]}`, because keys have the prefix {group}.")
    defaults = values.pop("defaults", [])
    if not isinstance(defaults, list):
        found.mistakes.append(f"{path}: defaults is {defaults}: it should be a list, like [{OVERRIDE}model: tiny]")
        defaults = []
    for each in defaults:
        name, chosen = next(iter(each.items())) if isinstance(each, dict) and len(each) == 1 else (group, each)
        of = str(name).removeprefix(OVERRIDE)
        added = Typed()
        if each == "_self_":
            continue
        if not isinstance(chosen, str) or (of == name) != (name == group) or (of != group and group != EXPERIMENT):
            form = f"CHOICE or `{OVERRIDE}GROUP: CHOICE`" if group == EXPERIMENT else f"a choice of {group}"
            added.mistakes.append(f"defaults has {each}: it should be {form}")
        elif of not in groups():
            added.mistakes.append(unknown(of, chosen, Config))
        elif of == group and chosen in (*within, choice):
            added.mistakes.append(f"defaults has {chosen}, which is based on this file: leave it out")
        else:
            choose(added, of, chosen, folders)
        found.mistakes += [f"{path}: {mistake}" for mistake in added.mistakes]
        if not added.mistakes:
            found.mistakes += choice_mistakes(of, chosen, folders, (*within, choice) if of == group else ())
    _add(found, path, flat(values, "" if group == EXPERIMENT else f"{group}."), Config)
    return found.mistakes
