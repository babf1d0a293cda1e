"""The structure of the package: which folder may import which, and what no file may contain."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sparsellm"
# A room, which is a folder or a file of the package, imports only from rooms of an earlier floor, or from itself. The
# order is told here alone; docs/dev/MAP.md lists the rooms, and a test below compares its list with this one.
FLOORS = [
    {"system"}, {"ops", "figures"}, {"config", "distributed", "policy"}, {"model"}, {"hf"}, {"runs", "inference"},
    {"data"}, {"evaluation"}, {"training", "analysis"}, {"sweep", "benchmark", "api"}, {"commands"}, {"cli"},
]  # fmt: skip
ENTRY_POINTS = len(FLOORS)
CONFIG_FLOORS = [
    {"errors", "groups", "keys"},
    {"architecture"},
    {"schema"},
    {"environment", "values"},
    {"rules", "overrides"},
    {"checkpoint_rules", "yaml_files"},
    {"commands", "compose"},
    {"command", "help"},
    {"__init__"},
]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    return next((i for i, rooms in enumerate(FLOORS) if name in rooms), ENTRY_POINTS)


def imported_rooms(path: Path, package: str = "sparsellm") -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path} has a relative import")
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            found.add(node.module.removeprefix(f"{package}.").split(".")[0])
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.startswith(f"{package}.")]
            found |= {name.removeprefix(f"{package}.").split(".")[0] for name in names}
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_from_lower_floors(path):
    own = room(path)
    for other in imported_rooms(path) - {own}:
        assert floor(other) < floor(own) or path.name == "__main__.py", f"{path.name} ({own}) imports {other}"


def test_every_folder_is_on_one_floor():
    rooms = [name for floor in FLOORS for name in floor]
    assert len(rooms) == len(set(rooms))
    assert {room(path) for path in FILES if path.parent != PACKAGE} <= set(rooms) <= {room(path) for path in FILES}


def test_the_map_lists_every_folder_from_the_lowest_floor_up():
    text = (ROOT / "docs" / "dev" / "MAP.md").read_text()
    tree = re.search(r"^sparsellm/\n(.*?)^\S", text, re.M | re.S)
    assert tree, "docs/dev/MAP.md has no list of the folders of sparsellm/"
    listed = re.findall(r"^  (\w+)(?:/|\.py) ", tree[1], re.M)
    assert sorted(listed) == sorted(set().union(*FLOORS))
    assert listed == sorted(listed, key=floor), "docs/dev/MAP.md lists a folder above one that it imports"


@pytest.mark.parametrize("path", sorted((PACKAGE / "config").glob("*.py")), ids=lambda p: p.name)
def test_config_has_floors_of_its_own(path):
    (own,) = (i for i, files in enumerate(CONFIG_FLOORS) if path.stem in files)
    assert imported_rooms(path, "sparsellm.config") <= set().union(*CONFIG_FLOORS[:own])


def test_no_modules_import_each_other_in_a_circle():
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
    left = {name: imported_modules(path, modules) - {name} for name, path in modules.items()}
    while free := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in free}
    assert left == {}


def imported_modules(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of `modules` that a file imports, including imports inside functions."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    pairs = ((node.module, f"{node.module}.{alias.name}") for node in nodes for alias in node.names)
    return {within if within in modules else module for module, within in pairs} & modules.keys()


def test_the_order_has_something_to_hold():
    assert "config" in imported_rooms(PACKAGE / "training" / "loop.py")
    assert "schema" in imported_rooms(PACKAGE / "config" / "rules.py", "sparsellm.config")


def test_only_two_files_know_omegaconf_and_hydra():
    knowing = {p.relative_to(PACKAGE).as_posix() for p in FILES if {"omegaconf", "hydra"} & top_level_imports(p)}
    assert knowing == {"config/compose.py", "config/overrides.py"}


def top_level_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_nothing_untrusted_is_executed():
    reader = PACKAGE / "runs" / "state_reader.py"
    for path in FILES:
        text = path.read_text()
        assert not {"pickle", "dill"} & top_level_imports(path) or path == reader, path
        assert "trust_remote_code=True" not in text, path
        assert "weights_only=False" not in text, path


def test_the_one_pickle_that_is_read_is_read_with_a_list_of_names():
    """state_reader.py takes of `pickle` the class that it restricts, and nothing else."""
    tree = ast.parse((PACKAGE / "runs" / "state_reader.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports if "pickle" in ast.unparse(node)] == ["import pickle"]
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "pickle"]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    (restricted,) = (each for each in classes if [ast.unparse(base) for base in each.bases] == ["pickle.Unpickler"])
    assert len(uses) == 1
    find = next(each for each in restricted.body if isinstance(each, ast.FunctionDef) and each.name == "find_class")
    assert ast.unparse(find.body[0]).startswith("if (module, name) not in NAMES:\n    _refuse(")


# They write by name into folders that they have just made, in which nobody can have planted a link.
INTO_NEW_FOLDERS = {
    "ops/build.py", "ops/compiler.py", "evaluation/tasks.py", "training/loop.py", "runs/checkpoint.py",
    "runs/committed.py", "commands/push.py", "hf/tokenizer_file.py",
}  # fmt: skip


def test_files_are_written_by_regular_or_into_new_folders():
    """Path.open would follow a link, and wait for a FIFO, that somebody has put where a file is to be."""
    writing = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            by_mode = name == "open" and any(set(text) & set("wax+") for text in texts if len(text) <= 3)
            if by_mode or name in ("write_text", "write_bytes", "touch"):
                writing.add(path.relative_to(PACKAGE).as_posix())
    assert writing == INTO_NEW_FOLDERS | {"system/files.py"}


def test_no_two_test_files_have_the_same_name():
    """pytest imports test files by name alone, and refuses the second one of a name only in runs that collect both."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
