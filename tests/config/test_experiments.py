"""The values of every experiment, written out a second time, and the tables of them in the documents.

A value of the paper's that changes in configs/ or in the schema's defaults fails here.
"""

import re
from pathlib import Path

import pytest
import yaml

from sparsellm.config import L1Normalization, from_overrides, l1_coefficient_as, parameters, sweep_request
from sparsellm.config.groups import CONFIGS, choices
from sparsellm.config.schema import Config
from sparsellm.config.values import flat, to_dict

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "PAPER.md").read_text()
DEFAULTS = flat(to_dict(Config()))
SIZES = {"0p5b": 8, "1b": 18, "1p5b": 28, "2b": 38}  # layers
# What the text, the released files and our experiments share.
PAPER = {
    "model.vocab_size": 49_152, "model.hidden_size": 2_048, "model.intermediate_size": 5_632, "model.num_heads": 32,
    "model.num_key_value_heads": None, "model.head_dim": None, "model.context_length": 2_048,
    "model.rope_theta": 100_000.0, "model.rope_parameters.rope_type": "default", "model.norm_eps": 1e-5,
    "model.init_std": 0.02, "model.gated": True, "model.attention_bias": False, "model.qk_norm": False,
    "model.tie_embeddings": True,
    "training.batch_size": 512, "training.sequence_length": 2_048,
    "optimizer.learning_rate": 1e-3, "optimizer.schedule": "cosine", "optimizer.warmup_steps": 600,
    "optimizer.beta1": 0.9, "optimizer.beta2": 0.95, "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1,
    "optimizer.grad_clip": 1.0,
    "sparsity.activation": "relu", "sparsity.relu_tokens": 0, "sparsity.l1_schedule": "constant",
    "sparsity.l1_start_tokens": 0, "sparsity.l1_warmup_tokens": 0, "sparsity.reinit_dead_after_tokens": None,
    "runtime.precision": "bfloat16", "runtime.recompute": "auto", "runtime.shard": "none", "init_from": None,
    "distill.teacher": None,
}  # fmt: skip
FINEWEB_EDU = {
    "data.name": "fineweb_edu", "data.source": "hub", "data.dataset": "HuggingFaceTB/smollm-corpus",
    "data.subset": "fineweb-edu-dedup", "data.split": "train", "data.text_column": "text",
    "data.tokenizer": "HuggingFaceTB/SmolLM2-135M", "data.validation_fraction": 0.005, "data.streaming": False,
    "data.mix": [], "data.seed": 0,
}  # fmt: skip
THE_PAPERS_DATA = FINEWEB_EDU | {
    "data.name": "paper", "data.dataset": "skymizer/fineweb-edu-dedup-45B", "data.subset": None,
    "data.validation_fraction": 0,
}  # fmt: skip
OURS = PAPER | FINEWEB_EDU | {
    "optimizer.final_lr_fraction": 0.1, "sparsity.l1_coefficient": 2e-5, "sparsity.l1_normalization": "sum",
    "sparsity.dead_after_tokens": 10_000_000,
}  # fmt: skip
RELEASED = PAPER | THE_PAPERS_DATA | {
    "training.steps": 30_000, "optimizer.final_lr_fraction": 0.0, "sparsity.l1_normalization": "layer_mean",
    "sparsity.dead_after_tokens": 131_072,
}  # fmt: skip
STEPS = {"0p5b": 9_537, "1b": 19_073, "1p5b": 28_610, "2b": 38_147}
WIDE_STEPS = {"0p5b": 15_259, "1b": 31_471, "1p5b": 47_684, "2b": 63_896}
COEFFICIENTS = {"0p5b": 3e-4, "1b": 3e-4, "1p5b": 2e-5, "2b": 2e-5}
EXPERIMENTS = {
    **{size: OURS | {"model.num_layers": layers, "training.steps": STEPS[size]} for size, layers in SIZES.items()},
    **{
        f"paper_{size}": RELEASED | {"model.num_layers": layers, "sparsity.l1_coefficient": COEFFICIENTS[size]}
        for size, layers in SIZES.items()
    },
    **{
        f"{size}_wide": OURS | {
            "model.num_layers": layers, "model.intermediate_size": 11_264, "training.steps": WIDE_STEPS[size],
            "sparsity.l1_coefficient": 1e-5, "runtime.shard": "optimizer" if size == "2b" else "none",
        }
        for size, layers in SIZES.items()
    },
    "7b": OURS | {
        "model.hidden_size": 4_096, "model.intermediate_size": 11_008, "model.num_layers": 32,
        "training.steps": 133_515, "optimizer.learning_rate": 3e-4, "runtime.shard": "full",
    },
    "mini": {
        "model.vocab_size": 8_192, "model.hidden_size": 512, "model.intermediate_size": 1_408, "model.num_layers": 8,
        "model.num_heads": 8, "model.context_length": 1_024,
        "data.name": "mini", "data.source": "files", "data.files": ["x"], "data.tokenizer_vocab_size": 8_192,
        "data.validation_fraction": 0.01, "sparsity.l1_coefficient": 8e-5,
        "optimizer.learning_rate": 2e-3, "optimizer.warmup_steps": 200,
        "training.steps": 4_578, "training.batch_size": 64, "training.sequence_length": 1_024,
        "logging.validation_every": 500, "logging.validation_samples": 1_024, "logging.wandb": "offline",
        "run.checkpoint_every": 1_500,
    },
    "smoke": {
        "model.vocab_size": 4_096, "model.hidden_size": 128, "model.intermediate_size": 512, "model.num_layers": 4,
        "model.num_heads": 4, "model.context_length": 256, "data.source": "stdlib_docs",
        "data.validation_fraction": 0.02, "sparsity.l1_coefficient": 1e-3, "sparsity.dead_after_tokens": 100_000,
        "optimizer.learning_rate": 3e-3, "optimizer.warmup_steps": 40,
        "training.steps": 400, "training.batch_size": 8, "training.sequence_length": 256,
        "runtime.precision": "float32", "runtime.compile": False, "runtime.micro_batch_size": 8,
        "runtime.deterministic": True, "runtime.data_workers": 0,
        "logging.validation_every": 100, "logging.validation_samples": 32, "logging.wandb": "offline",
        "run.checkpoint_every": 100,
    },
}  # fmt: skip


def values(experiment: str) -> dict:
    files = ["data.files=[x]"] if experiment == "mini" else []
    return flat(to_dict(from_overrides([f"experiment={experiment}", *files])))


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_an_experiment_has_these_values_and_the_defaults_for_all_others(experiment):
    expected, found, derived = EXPERIMENTS[experiment], values(experiment), ("data.path", "run.name")
    assert {k: v for k, v in found.items() if k in expected or (v != DEFAULTS[k] and k not in derived)} == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("fineweb_edu_stream", FINEWEB_EDU | {"data.name": "fineweb_edu_stream", "data.streaming": True}),
        ("files", {"data.name": "files", "data.source": "files", "data.files": ["x"], "data.tokenizer": "t"}),
    ],
)
def test_a_corpus_without_an_experiment_has_these_values(choice, expected):
    files = ["data.files=[x]", "data.tokenizer=t"] if choice == "files" else []
    found = flat(to_dict(from_overrides([f"data={choice}", *files]).data), "data.")
    found.pop("data.path")
    assert found == {key: DEFAULTS[key] for key in found} | expected


# Values of published models that test_architectures.py does not hold by their number of parameters.
SHAPES = {
    "llama2_7b": {"context_length": 4_096, "rope_theta": 1e4},
    "llama3_8b": {"context_length": 8_192, "rope_theta": 5e5},
    "llama3p2_1b": {
        "context_length": 131_072, "rope_theta": 5e5, "rope_parameters.rope_type": "llama3",
        "rope_parameters.factor": 32.0, "rope_parameters.original_max_position_embeddings": 8_192,
        "rope_parameters.low_freq_factor": 1.0, "rope_parameters.high_freq_factor": 4.0,
    },
    "mistral_7b": {"context_length": 32_768, "rope_theta": 1e6},
    "qwen2p5_0p5b": {"context_length": 32_768, "rope_theta": 1e6, "norm_eps": 1e-6},
    "qwen2p5_7b": {"context_length": 131_072, "rope_theta": 1e6, "norm_eps": 1e-6},
    "qwen3_0p6b": {"context_length": 32_768, "rope_theta": 1e6, "norm_eps": 1e-6},
    "qwen3_8b": {"context_length": 32_768, "rope_theta": 1e6, "norm_eps": 1e-6},
    "smollm2_135m": {"context_length": 8_192, "init_std": 576**-0.5},
    "smollm2_360m": {"context_length": 8_192},
    "smollm2_1p7b": {"context_length": 8_192, "rope_theta": 1.3e5},
}  # fmt: skip
COUNTED = {  # by the number of parameters
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_key_value_heads", "head_dim",
    "attention_bias", "qk_norm", "tie_embeddings",
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_shape_has_these_values_beyond_its_number_of_parameters(name):
    found = flat(to_dict(from_overrides([f"model={name}", "sparsity=dense_silu"]).model), "model.")
    differ = {key.removeprefix("model."): value for key, value in found.items() if value != DEFAULTS[key]}
    assert {key: value for key, value in differ.items() if key not in COUNTED} == SHAPES[name]


def shown(value) -> str:
    """A value as docs/PAPER.md writes it: 30,000, 2e-5, false."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and value >= 1):
        return f"{value:,.0f}"
    if isinstance(value, float):
        return re.sub("e-0", "e-", f"{value:.2g}" if value == 0 or value >= 0.01 else f"{value:.0e}")
    return str(value)


def test_the_table_of_the_recipe_follows_from_the_configurations():
    rows = re.findall(r"^\| `(\w+\.\w+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE, re.M)
    assert [key for key, *_ in rows] == [
        "data.dataset", "data.validation_fraction", "training.steps", "optimizer.final_lr_fraction",
        "sparsity.l1_coefficient", "sparsity.l1_normalization", "sparsity.dead_after_tokens", "runtime.recompute",
        "model.rope_theta",
    ]  # fmt: skip
    for key, _released, *cells, _why in rows:
        for prefix, cell in zip(("paper_", ""), cells, strict=True):
            each = [shown(values(f"{prefix}{size}")[key]) for size in SIZES]
            assert cell == (each[0] if len(set(each)) == 1 else " / ".join(each)), f"{prefix}{key}"


def test_the_table_of_experiments_follows_from_the_configurations():
    lines = (DOCS / "TRAINING.md").read_text().splitlines()
    rows = [re.split(r" *\| *", line)[1:-1] for line in lines if re.match(r"\| `\w+` \| [\d,.]+M \|", line)]
    assert [name.strip("`") for name, *_ in rows] == [
        "smoke",
        "mini",
        *SIZES,
        "7b",
        *(f"{size}_wide" for size in SIZES),
    ]
    for name, weights, layers, width, neurons, rate, coefficient, batch, steps, tokens, _hours in rows:
        found = values(name.strip("`"))
        millions = parameters(from_overrides([f"model={name.strip('`')}".replace("smoke", "tiny")]).model) / 1e6
        per_step = found["training.batch_size"] * found["training.sequence_length"]
        read = found["training.steps"] * per_step / 1e6
        assert weights == (f"{millions:.1f}M" if millions < 100 else f"{millions:,.0f}M"), name
        assert tokens == (f"{read / 1e3:.0f}B" if read >= 1e3 else f"{read:.0f}M" if read > 1 else f"{read:.1f}M"), name
        assert batch == f"{found['training.batch_size']} x {found['training.sequence_length']:,}", name
        expected = [shown(found[f"model.{key}"]) for key in ("num_layers", "hidden_size", "intermediate_size")]
        expected += [shown(found[key]) for key in ("optimizer.learning_rate", "sparsity.l1_coefficient")]
        found_here = [layers, width, neurons, rate, coefficient.removesuffix(" (not tried)")]
        assert [*found_here, steps] == [*expected, shown(found["training.steps"])], name


def test_the_coefficients_that_the_page_derives_follow_from_the_factor_of_64():
    derived, times = [], []
    for size in SIZES:
        config = from_overrides([f"experiment={size}", "sparsity.l1_normalization=layer_mean"])
        config.sparsity.l1_coefficient = 512 / 8 * 2e-5
        derived.append(l1_coefficient_as(config.sparsity, config.model, L1Normalization.sum))
        times.append(derived[-1] / OURS["sparsity.l1_coefficient"])
    said = " ".join(PAGE.split())
    assert "512 / 8 = 64 times" in said
    assert "1.28e-3 under `layer_mean`, or " + " / ".join(f"{c:.1e}".replace("e-0", "e-") for c in derived) in said
    assert " / ".join(f"{t:.2g}" for t in times) + " times the default" in said


def test_the_list_of_coefficients_is_the_one_on_the_page_and_a_typed_one_replaces_it():
    axes = sweep_request(["experiment=1p5b", "sweep=paper_l1"]).axes
    listed = [0, 5e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 5e-5, 1e-4]
    assert [from_overrides([text]).sparsity.l1_coefficient for text in axes["sparsity.l1_coefficient"]] == listed
    texts = yaml.safe_load((CONFIGS / "sweep/paper_l1.yaml").read_text())["sparsity.l1_coefficient"].split(",")
    assert f"sweeps {', '.join(texts[:-1])} and {texts[-1]}." in PAGE
    for typed in (["sweep=paper_l1", "sparsity.l1_coefficient=1,2"], ["sparsity.l1_coefficient=1,2", "sweep=paper_l1"]):
        assert sweep_request(typed).axes == {
            "sparsity.l1_coefficient": ["sparsity.l1_coefficient=1", "sparsity.l1_coefficient=2"]
        }
