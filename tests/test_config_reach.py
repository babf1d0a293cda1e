"""The whole configuration goes to few functions: a component takes the groups of keys that it may read."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "sparsellm"
SIGNATURES, FUNCTIONS = 20, 25  # at most; 96 and 46 before components took their own groups
Function = ast.FunctionDef | ast.AsyncFunctionDef


def takes_all(node: ast.AST) -> bool:
    """Whether a function has a parameter, or a class a field, that is a whole Config, maybe None."""
    if isinstance(node, Function):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations = [argument.annotation for argument in arguments]
    elif isinstance(node, ast.ClassDef):
        annotations = [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
    else:
        return False
    names = [name for each in annotations if each is not None for name in ast.unparse(each).strip("'").split(" | ")]
    return "Config" in names


@cache
def definitions() -> list[tuple[str, ast.ClassDef | Function]]:
    """(file, node) of each class and function."""
    return [
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | Function)
    ]


def test_few_signatures_take_the_whole_configuration():
    found = [f"{file}:{node.lineno} {node.name}" for file, node in definitions() if takes_all(node)]
    assert any(each.startswith("training/run.py:") and each.endswith(" run") for each in found)
    assert len(found) <= SIGNATURES, "\n".join(found)


def test_few_functions_are_reached_by_the_configuration_of_a_run():
    """Follows calls that pass on `config`, or the `self.config` of a class that stores it, from the start of a run."""
    constructors = [
        (file, node)
        for file, node in definitions()
        if isinstance(node, ast.ClassDef) and any(takes_all(each) for each in node.body)
    ]
    whole = [(file, node) for file, node in definitions() if takes_all(node)]
    taking = {f"{file}:{node.name}": node for file, node in whole + constructors}
    found: set[str] = set()
    waiting = ["training/run.py:check", "training/run.py:run"]
    while waiting:
        if (place := waiting.pop()) in found:
            continue
        found.add(place)
        for call in ast.walk(taking[place]):
            passed = [*call.args, *(k.value for k in call.keywords)] if isinstance(call, ast.Call) else []
            if any(ast.unparse(each) in ("config", "self.config") for each in passed):
                called = ast.unparse(call.func).rpartition(".")[2]
                waiting += [each for each in taking if each.endswith(f":{called}")]
    assert {"training/loop.py:Trainer", "runs/folder.py:open_folder"} <= found
    assert len(found) <= FUNCTIONS, "\n".join(sorted(found))
