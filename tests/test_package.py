"""What importing the package requires."""

import subprocess
import sys
from importlib import metadata

import sparsellm

NOT_FOR_MODELS = {"hydra", "omegaconf", "lm_eval", "datasets", "wandb", "matplotlib", "pandas"}


def imported_by(code: str) -> set[str]:
    code += "; import sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_alone_imports_no_torch():
    assert "torch" not in imported_by("import sparsellm")


def test_accelerate_imports_no_tool_of_training_or_evaluation():
    found = imported_by("import sparsellm; sparsellm.accelerate")
    assert "torch" in found
    assert found & NOT_FOR_MODELS == set()


def test_the_version_is_that_of_the_installed_package():
    assert sparsellm.__version__ == metadata.version("sparsellm")
