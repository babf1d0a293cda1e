"""A package that is missing is a sentence that names it."""

import subprocess
import sys

import pytest

from sparsellm import SparsellmError
from sparsellm.system.packages import needed_by


@pytest.mark.parametrize(
    ("module", "package"), [("wandb", "wandb"), ("lm_eval", "'lm-eval[hf]'"), ("datasets", "datasets")]
)
def test_the_sentence_names_what_needs_the_package_and_how_to_install_it(monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SparsellmError) as raised, needed_by("evaluate"), needed_by("a part of it"):
        __import__(module)
    assert str(raised.value) == (
        f"a part of it needs the package {module}, which is not installed: install it with `pip install {package}`"
    )
    assert isinstance(raised.value, ModuleNotFoundError)


@pytest.mark.parametrize("name", ["sparsellm.no_such_module", "_lzma"])
def test_a_module_of_ours_or_of_python_is_no_package_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError) as raised, needed_by("evaluate"):
        __import__(name)
    assert not isinstance(raised.value, SparsellmError)


def test_a_command_without_a_package_ends_with_that_sentence():
    code = "import sys; sys.modules['hydra'] = None; sys.argv[1:] = ['train']; from sparsellm import cli; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "sparsellm train: starting",
        "sparsellm: sparsellm train needs the package hydra, which is not installed: install it with"
        " `pip install hydra-core`",
    ]
