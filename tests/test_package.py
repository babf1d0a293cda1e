"""What importing the package requires."""

import subprocess
import sys
from importlib import metadata

import torch
from inference.small_models import SIZE, assert_same, logits
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import sparsellm

# What the package requires and torch and transformers do not.
NOT_FOR_MODELS = {
    "datasets", "hydra", "lm_eval", "matplotlib", "ninja", "omegaconf", "pandas", "pynvml", "tensorboard", "wandb",
    "xxhash",
}  # fmt: skip


def imported_by(code: str) -> set[str]:
    code += "; import sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_alone_imports_no_torch():
    assert "torch" not in imported_by("import sparsellm")


def test_models_are_imported_where_only_torch_and_transformers_are_installed():
    blocked = f"import sys; sys.modules.update(dict.fromkeys({NOT_FOR_MODELS}))"
    assert "torch" in imported_by(f"{blocked}; import sparsellm; sparsellm.accelerate; sparsellm.Generator")


def test_models_run_where_only_torch_and_transformers_are_installed(monkeypatch, tmp_path):
    """The modules above are imported in this process too; what they import while they run is not there."""
    model = LlamaForCausalLM(LlamaConfig(**SIZE, hidden_act="relu", eos_token_id=0)).eval()
    model.save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "The": 1}, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    expected = logits(model, ids)
    for name in NOT_FOR_MODELS:
        monkeypatch.setitem(sys.modules, name, None)
    assert_same(logits(sparsellm.accelerate(model), ids), expected)
    assert list(sparsellm.Generator.load(tmp_path, "cpu").stream([[1]], 1))


def test_the_version_is_that_of_the_installed_package():
    assert sparsellm.__version__ == metadata.version("sparsellm")
