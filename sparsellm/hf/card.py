"""The model card of a checkpoint, hf/README.md: what the model is, what it was trained on, and with which command.

Built from the configuration and the rows of metrics.jsonl up to the checkpoint, so the same state gives the same card.
The card may become public, so it leaves out times, host names, folders of paths outside the working directory, and
passwords, queries and fragments of URLs. Names are escaped for Markdown and HTML.
"""

import html
import re
import shlex
from enum import Enum
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from sparsellm.config import (
    Activation,
    Config,
    DataConfig,
    DistillConfig,
    ModelConfig,
    RopeType,
    Source,
    SparsityConfig,
    definition,
    from_overrides,
    parameters,
    quoted,
)
from sparsellm.config.schema import relu_share
from sparsellm.hf import conversion

WARMUP = "optimizer.warmup_steps"  # always written out: composing would shorten the default for a short run
MAX_TOKENS = "data.max_tokens"
LICENCE = "FILL IN"
FOLDER = "FOLDER"  # replaces the folders of a path outside the working directory

_TEXT = """\
---
# license: {licence}, such as apache-2.0
{head}
---

# {name}, step {step:,}

{kind} with {parameters:,} parameters, trained with sparsellm (after arXiv:2603.23198). It is a stock
`{architecture}` with `hidden_act: {activation}`: transformers loads it as it is.

| | |
|---|---|
{table}

## Training

{commands}

## Licence

{licence}: the licences of the weights, the data and the tokenizer. `sparsellm push license=NAME` writes the licence of
the weights into the card that it uploads. For the other two, edit a copy of this folder: the checkpoint has checksums
of the files in this folder.
"""


def text(config: Config, step: int, rows: list[dict[str, Any]], prepared: int | None = None) -> str:
    """The card of the run's checkpoint at `step`.

    `rows`: all rows of metrics.jsonl, or those from metrics.telling; rows after `step` are ignored. `prepared`: see
    `commands_of`.
    """
    rows = [row for row in rows if row["step"] <= step]
    model, training, sparsity = config.model, config.training, config.sparsity
    relu, tokens = sparsity.activation == Activation.relu, step * training.tokens_per_step
    kind = f"A language model whose feedforward layers are {'sparse (ReLU)' if relu else 'dense (SiLU)'},"
    l1 = f"{sparsity.l1_coefficient:g} (`{sparsity.l1_normalization.name}`)"
    facts = [
        *_model_facts(model),
        *_origin_facts(config.init_from, sparsity, config.distill, tokens),
        ("data", _data(config.data)),
        ("tokens", f"{tokens:,} of {training.steps * training.tokens_per_step:,}"),
        *([("L1 coefficient", l1)] if relu else []),
        *_measured_facts(rows, model.intermediate_size),
    ]
    return _TEXT.format(
        licence=LICENCE, head=_head(config.run.name, rows), name=config.run.name, step=step, kind=kind,
        parameters=parameters(model), table="\n".join(f"| {what} | {value} |" for what, value in facts),
        architecture=conversion.class_name(model), activation=sparsity.activation.name,
        commands="\n".join(f"    {command}" for command in commands_of(config, prepared)),
    )  # fmt: skip


def _head(name: str | None, rows: list[dict[str, Any]]) -> str:
    """The card's YAML header, with the latest task scores as the hub's evaluation results."""
    scores = (_last(rows, "evaluation") or {"evaluation": {}})["evaluation"]
    results = [
        EvalResult("text-generation", task, task, "acc", round(score, 4))
        for task, score in scores.items()
        if score is not None and task != "mean"
    ]
    scored: dict[str, Any] = {"model_name": name, "eval_results": results} if results else {}
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["sparsellm", "sparse-activations"], **scored
    )
    return data.to_yaml()


def _last(rows: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """The last of `rows` that has `key`."""
    return next((row for row in reversed(rows) if row.get(key) not in (None, {})), None)


def licence(card: str) -> str | None:
    """The licence in the card's YAML header (a hub licence name). Raises ValueError if the header cannot be read."""
    return _parsed(card).data.license


def licensed(card: str, name: str) -> str:
    """The card with `name` as the licence of the weights, in its YAML header and in the placeholder of its text.

    Raises ValueError if the header cannot be read.
    """
    parsed = _parsed(card)
    if parsed.data.license is None:
        parsed.data.license = name
        card = parsed.content
    said = f"{name}, for the weights. Data and tokenizer have licences of their own."
    return re.sub(rf"^{LICENCE}: .*?(?=\n\n|\n?\Z)", lambda _: said, card, flags=re.DOTALL | re.MULTILINE)


def scored(card: str, name: str, tasks: dict[str, dict[str, Any]]) -> str:
    """The card of the model `name` with the scores `tasks` from `evaluate` added, in its YAML header and as a table.

    Raises ValueError if the header cannot be read.
    """
    parsed = _parsed(card)
    parsed.data.model_name = parsed.data.model_name or name
    parsed.data.eval_results = [
        EvalResult("text-generation", task, task, found["metric"], round(found["score"], 4))
        for task, found in tasks.items()
    ]
    table = ["| task | score | metric | rows |", "|---|---|---|---|"]
    table += [f"| {task} | {t['score']:.4f} | {t['metric']} | {t['rows']:,} |" for task, t in tasks.items()]
    before, heading, after = str(parsed.content).partition("\n## Licence\n")
    return "\n".join([before, "## Scores", "", "Zero-shot, by `sparsellm evaluate`.", "", *table, ""]) + heading + after


def _parsed(card: str) -> Any:  # a ModelCard, whose data has the fields that the card gives
    try:
        return ModelCard(card)
    except Exception as error:  # from the YAML parser, or from huggingface_hub for unknown values
        raise ValueError(f"its YAML header cannot be read as a model card's: {' '.join(str(error).split())}") from error


def commands_of(config: Config, prepared: int | None = None) -> list[str]:
    """The commands that prepare the data (if it has one source) and train the same model.

    `prepared`: the number of prepared training tokens that the run found. This number decides the order of the tokens,
    even if the run needs fewer. The reader must replace FOLDER, which stands for folders of this machine.
    """
    default, typed = definition(from_overrides([])), dict[str, Any]()
    for key, value in definition(config).items():
        from_init = config.init_from is not None and key.startswith("model.")
        if not from_init and (value != default[key] or key == WARMUP):
            typed[key] = value
    commands = [("train", typed)]
    if not (config.data.streaming or config.data.mix):
        all_there_is = prepared is None or config.data.source == Source.stdlib_docs
        commands.insert(0, ("prepare_data", typed if all_there_is else typed | {MAX_TOKENS: prepared}))
    return [
        " ".join(["sparsellm", name, *(_argument(f"{key}={_spelled(value)}") for key, value in values.items())])
        for name, values in commands
    ]


def _spelled(value: Any) -> str:
    """`value` as written in an override."""
    if isinstance(value, list):
        return f"[{','.join(map(_spelled, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_spelled(each)}' for key, each in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    value = without_folders(value)
    return quoted(value.name if isinstance(value, Enum) else value) if isinstance(value, str | Enum) else str(value)


def without_folders(value: Any) -> Any:
    """`value`, recursively, without what belongs to this machine or user: folders of paths outside the working
    directory; passwords, queries and fragments of URLs."""
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_folders(each) for each in value]
    if not isinstance(value, str):
        return value
    if "://" in value and "::" in value:  # zip://*.jsonl::https://host/archive.zip
        return "::".join(map(without_folders, value.split("::")))
    if "://" in value and not value.startswith("file://"):
        return re.sub(r"[?#].*", "", re.sub(r"://[^/?#]*@", "://", value), flags=re.DOTALL)
    if value.startswith(("/", "~", "file://")) or ".." in Path(value).parts:
        return f"{FOLDER}/{Path(value).name}"
    return value


def _argument(text: str) -> str:
    """`text` quoted for a shell, on one line, because a newline would end the card's code block."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = re.sub(r"[\\']", r"\\\g<0>", text)
    return "$'" + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + "'"


def _escaped(name: str) -> str:
    """`name` escaped so that a Markdown table cell shows it literally, on one line."""
    return re.sub(r"[\\`*|\[\]]", r"\\\g<0>", html.escape(" ".join(name.split()), quote=False))


def _data(data: DataConfig) -> str:
    source = " ".join(without_folders(part) for part in (data.dataset, data.subset) if part)
    return _escaped(" + ".join(data.mix_names) if data.mix else data.name + (f" ({source})" if source else ""))


def _measured_facts(rows: list[dict[str, Any]], neurons: int) -> list[tuple[str, str]]:
    """The latest losses, scores and nonzeros in `rows`. `neurons`: per layer."""
    if not rows:
        return []
    last, found = rows[-1], []
    if last["ce"] is not None:
        found.append(("cross entropy, training", f"{last['ce']:.3f} (step {last['step']:,})"))
    if validated := _last(rows, "val_ce"):
        found.append(("cross entropy, held-out", f"{validated['val_ce']:.3f} (step {validated['step']:,})"))
    if scored := _last(rows, "evaluation"):
        scores = scored["evaluation"].items()
        each = ", ".join(f"{_escaped(name)} {score:.4f}" for name, score in scores if score is not None)
        found.append((f"scores at step {scored['step']:,}", each))
    if last["nnz_per_layer"] is not None:
        each = ", ".join(f"{nonzeros:,.1f}" for nonzeros in last["nnz_per_layer"])
        found.append(("nonzeros per token", f"{last['nnz_mean']:,.1f} of {neurons:,}; by layer {each}"))
    return found


def _origin_facts(
    init_from: str | None, sparsity: SparsityConfig, distill: DistillConfig, tokens: int
) -> list[tuple[str, str]]:
    """The models that these weights come from, and how far the gate has changed from SiLU to ReLU at `tokens`."""
    found = []
    if init_from is not None:
        found.append(("initial weights", f"{_escaped(_spelled(init_from))}, whose licence applies too"))
    if sparsity.relu_tokens:
        gate = f"from SiLU to ReLU over {sparsity.relu_tokens:,} tokens"
        if (share := relu_share(tokens, sparsity)) < 1:
            gate += f"; cross entropies and nonzeros were measured with this step's gate, {share:.0%} ReLU, not with"
            gate += " the final gate, with which this model is loaded"
        found.append(("gate", gate))
    if distill.teacher is not None:
        found.append(("teacher", f"{_escaped(_spelled(distill.teacher))}, weight {distill.weight:g}"))
    return found


def _model_facts(model: ModelConfig) -> list[tuple[str, str]]:
    """The shape, and the differences from plain multi-head attention with a tied output matrix."""
    layers = f"{model.num_layers} of {model.intermediate_size:,} neurons, {'gated' if model.gated else 'not gated'}"
    width = f"{model.hidden_size:,}, {model.num_heads}, {model.context_length:,}"
    said = [
        (model.kv_heads != model.num_heads, f"{model.kv_heads} key/value heads"),
        (model.head_dim is not None, f"head dimension {model.head_width}"),
        (model.attention_bias, "query, key and value biases"),
        (model.qk_norm, "normalised queries and keys"),
        (model.rope_parameters.rope_type != RopeType.default, f"{model.rope_parameters.rope_type.name} rotary scaling"),
        (not model.tie_embeddings, "output matrix not tied to the embedding"),
    ]
    differences = "; ".join(what for holds, what in said if holds)
    attention = [("attention and head", differences)] if differences else []
    return [("layers", layers), ("width, heads, context", width), *attention]
