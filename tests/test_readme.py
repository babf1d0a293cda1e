"""What the documents say can be done: commands compose, links lead somewhere, pictures follow from the tables."""

import json
import re
import shlex
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from scripts import draw_readme
from sparsellm.config import EvaluateConfig, from_overrides, mistakes, sweep_request, to_dict
from sparsellm.config.commands import COMMANDS
from sparsellm.ops import backend, float8

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "kernels/README.md"]
DOCUMENTS += [ROOT / "scripts/benchmarks/README.md"]
GUIDE = sorted((ROOT / "docs").glob("*.md"))
HISTORY = ROOT / "docs/dev/LOG.md"  # its commands are what was typed then
BEGINNINGS = ("sparsellm ", "python -m sparsellm.", "python -m scripts.benchmarks.bench_train ", "torchrun ")


class Command(NamedTuple):
    document: Path
    name: str  # of COMMANDS, or what follows sparsellm. or scripts.benchmarks.
    arguments: list[str]
    ranks: int

    def __str__(self) -> str:
        return f"{self.document.stem}: {self.name} {' '.join(self.arguments)}"


def commands(document: Path) -> list[Command]:
    """The command lines of a document's fenced blocks, and of code within its sentences."""
    text = document.read_text().replace("\\\n", " ")
    blocks = [line for block in re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    found = []
    for line in [*blocks, *(" ".join(code.split()) for code in inline)]:
        if not line.startswith(BEGINNINGS):
            continue
        words = [word for word in shlex.split(line, comments=True) if word != "..."]
        words = words[: words.index("<")] if "<" in words else words  # what follows is the shell's
        ranks = int(words[words.index("--nproc_per_node") + 1]) if "--nproc_per_node" in words else 1
        start = 1 if words[0] == "sparsellm" else words.index("-m") + 1
        name = words[start].removeprefix("sparsellm.").removeprefix("scripts.benchmarks.")
        if name.isupper():
            continue  # `sparsellm COMMAND`, `python -m sparsellm.X`: said of all commands
        found.append(Command(document, name, words[start + 1 :], ranks))
    return found


ALL = [command for document in DOCUMENTS if document != HISTORY for command in commands(document)]


def composed(command: Command) -> list[str]:
    """Every mistake in the values of `command`. Raises ConfigError for what does not compose."""
    name, overrides = command.name, command.arguments
    if name in COMMANDS and name not in ("train", "prepare_data", "sweep"):
        return COMMANDS[name].mistakes(from_overrides(overrides, COMMANDS[name].schema))
    if name == "sweep":
        request = sweep_request(overrides)
        from_overrides(request.evaluate, EvaluateConfig)
        runs = [list(texts) for texts in product(*request.axes.values())]
    elif name == "bench_train":
        options = next((i for i, word in enumerate(overrides) if word.startswith("--")), len(overrides))
        common, rest = overrides[:options], overrides[options:]
        variants = [rest[i + 1].split() for i, word in enumerate(rest) if word == "--variant"]
        runs = [[*common, *variant] for variant in variants or [[]]]
    else:
        runs = [overrides]
    return [mistake for run in runs for mistake in mistakes(from_overrides(run), command.ranks)]


@pytest.mark.parametrize(
    "command", [c for c in ALL if c.name in {*COMMANDS, "bench_train"} and c.arguments != ["--help"]], ids=str
)
def test_a_command_in_the_documents_is_accepted(command, monkeypatch):
    monkeypatch.setattr(backend, "check", lambda _: None)  # the kernels that it demands need not run here
    for name in ("missing", "obstacle"):  # nor torchao, nor FP8
        monkeypatch.setattr(float8, name, lambda: None)
    assert composed(command) == []


def test_every_command_is_documented():
    assert {command.name for command in ALL} == {*COMMANDS, "bench_train", "ops.build"}
    assert {c.name for c in ALL if c.document == ROOT / "README.md"} == set(COMMANDS)


def test_commands_are_found_in_blocks_and_in_sentences(tmp_path):
    document = tmp_path / "X.md"
    document.write_text("""Say `sparsellm COMMAND`:

```bash
torchrun ... --nproc_per_node 8 -m sparsellm.train b=2 \\
    'c=[3, 4]'  # why
python -m sparsellm.analyze d=5
```
Or `sparsellm train
a=1`.
""")
    assert [(c.name, c.arguments, c.ranks) for c in commands(document)] == [
        ("train", ["b=2", "c=[3, 4]"], 8), ("analyze", ["d=5"], 1), ("train", ["a=1"], 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if d != HISTORY], ids=lambda path: str(path.relative_to(ROOT))
)
def test_code_blocks_are_fenced_and_name_their_language(document):
    fences = re.findall(r"^ *```(.*)$", document.read_text(), re.M)
    assert len(fences) % 2 == 0, f"{document.name} has a block that does not end"
    assert all(fences[::2]), f"{document.name} has a block without a language"
    outside = re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.M | re.S)
    indented = [line for line in outside.splitlines() if re.match(r"    +(?![-*|\d ])", line)]
    assert not indented, f"{document.name} has a block without fences: {indented[0]}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes from a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_pictures_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), f"{document.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(linked), f"{document.name} links to {target}: no such heading"


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if d != HISTORY], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_file_that_a_document_names_exists(document):
    for name in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|yaml|sh|h|cu|cuh|cpp))`", document.read_text()):
        kernels = ROOT / "kernels"
        folders = (ROOT, ROOT / "sparsellm", kernels, kernels / "portable", kernels / "sm90")
        places = [folder / name for folder in folders]
        assert any(path.exists() for path in places), f"{document.name} names {name}, which does not exist"


@pytest.mark.parametrize("document", GUIDE, ids=lambda path: path.name)
def test_a_table_of_the_guide_has_a_caption(document):
    lines = [line for line in document.read_text().splitlines() if line]
    for above, line in pairwise(lines):
        if line.startswith("|") and not above.startswith("|"):
            assert above.endswith("*"), f"{document.name}: no sentence in *italics* above the table {line}"


def test_no_document_needs_files_that_nobody_can_make():
    for document in DOCUMENTS:
        if document != HISTORY and "--activations" in (text := document.read_text()):
            assert "recordings=" in text or "RESULTS.md" in text, f"{document.name} does not say how to record"


def test_the_pictures_follow_from_the_tables():
    text = (ROOT / "docs/RESULTS.md").read_text()
    training = draw_readme.table("One layer: forward and backward", text)
    assert draw_readme.layer_speed_ups(training, ("tile", "dense engine"))[1][0] == 3.28
    figure = draw_readme.draw_gains(text)
    gains = {axes.get_title(loc="left"): [label.get_text() for label in axes.texts] for axes in figure.axes}
    forward = [row for rows in draw_readme.tables("Forward pass of whole models", text) for row in rows]
    cells = {row["model"]: row["energy per token"] for row in forward}
    energy = {model: 100 - 100 * draw_readme.number(cells[model]) for model in draw_readme.MODELS}
    printed = [row["paper: energy per token"] for row in draw_readme.table("Compared with the paper", text)]
    assert gains["forward energy: less"] == [
        *(f"{energy[model]:.0f}" for model in draw_readme.MODELS), *(each.strip("-%") for each in printed),
    ]  # fmt: skip
    draw_readme.plt.close(figure)
    with Image.open(ROOT / "docs/gains.png") as picture:
        stale = "docs/gains.png has other numbers: run python -m scripts.draw_readme"
        assert picture.info["Source"] == draw_readme.checksum(text), stale
    assert draw_readme.checksum(text) != draw_readme.checksum(text.replace("1.44", "1.45"))
    lines = map(json.loads, (ROOT / "docs/results/0p5b_150m.jsonl").read_text().splitlines())
    (rows,) = (run["rows"] for run in lines if run["name"] == "kernels")
    nonzeros = {row["step"]: row["nnz_mean"] for row in rows}
    diagram = (ROOT / "docs/how_it_works.svg").read_text()
    for step in (1, 200, 400):
        assert f"step {step}: {nonzeros[step]:,.0f} of 5,632 active" in diagram
    with pytest.raises(ValueError, match="no section 'Elsewhere'"):
        draw_readme.table("Elsewhere", text)


def test_the_runs_of_the_picture_follow_from_their_file(tmp_path, monkeypatch):
    """Made-up runs of two steps: what is written of them is computed from the file."""
    monkeypatch.setattr(draw_readme, "RUNS", tmp_path / "runs.jsonl")
    text = (ROOT / "docs/RESULTS.md").read_text()

    def written(loss):
        """The checksum and all texts, if the sparse run ends at `loss`."""
        lines = []
        for name in draw_readme.ENDS:
            relu, width = name.startswith("l1"), 11264 if "11264" in name else 5632
            overrides = ["training.steps=2", f"model.intermediate_size={width}", *["sparsity=dense_silu"] * (not relu)]
            rows = [
                {
                    "step": step, "tokens": step * 1_000_000, "val_ce": loss if relu else 3.0, "tokens_per_s": 1e6,
                    "nnz_mean": 100.0 if relu else None, "mj_per_token": 4.0,
                }
                for step in (1, 2)
            ]  # fmt: skip
            lines.append({"name": name, "config": to_dict(from_overrides(overrides)), "rows": rows})
        draw_readme.RUNS.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
        figure = draw_readme.draw_gains(text)
        draw_readme.plt.close(figure)
        labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        return draw_readme.checksum(text), "\n".join([*labels, *(text.get_text() for text in figure.texts)])

    (first, lower), (second, higher) = written(2.95), written(3.01)
    assert first != second
    assert "2M tokens" in lower
    assert "ReLU + L1 ends 0.050 nats lower in 1.00x the time" in lower
    assert "ReLU + L1 ends 0.010 nats higher in 1.00x the time" in higher
    assert "N 11,264: 2.950 after 2 s" in lower
