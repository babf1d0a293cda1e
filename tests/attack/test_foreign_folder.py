"""A run folder that others tampered with: whatever a command finds, it answers with one sentence, and soon.

What is planted is drawn from all pairs of a path and a kind: no command waits for it, is ended by a traceback, or
writes through a link.
"""

import os
import random
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
from attack import kills
from attack.seed import SEED
from processes import SERVER, started

PATIENCE = 30  # seconds
ATTACKS = 3  # of each test
RUN = "runs/r"
LAST = f"{RUN}/checkpoints/step_00000012"
# What commands look for; "" is the folder itself.
IN_A_MODEL = [
    "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "generation_config.json",
    "README.md", "special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json", "",
]  # fmt: skip
IN_A_CHECKPOINT = [
    "COMMITTED", "state/values.json", "state/rank_00000.json", "state/.metadata", "state", "hf",
    "evaluation/results.json", "evaluation/results.json.partial", "evaluation/tasks/piqa.json", "evaluation",
    "analysis/analysis.json", "analysis/analysis.json.partial", "analysis", "benchmark/benchmark.json", "",
]  # fmt: skip
IN_A_RUN = [
    "config.yaml", "config.yaml.partial", "metrics.jsonl", "metrics.jsonl.partial", "lock", "plots/loss.png", "plots",
    "checkpoints/step_00000012.partial", "checkpoints/step_00000013", "checkpoints", "",
]  # fmt: skip


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10**10)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound, chdir(path.parent):  # its path has 107 bytes at the most
        bound.bind(path.name)


PLANTED: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": bind,
    "a folder": Path.mkdir,
    "an empty file": Path.touch,
    "10 GB of zeros": sparse,
    "a link to nothing": lambda path: path.symlink_to("/nothing/there"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to zeros without end": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file of the user's": lambda path: path.symlink_to(precious(path)),
    "nothing": lambda path: None,
}


def precious(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / "precious").exists()) / "precious"


def plant(path: Path, kind: str) -> None:
    """Replace `path` by `kind`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    PLANTED[kind](path)


def answer(command: list[str], folder: Path) -> str | None:
    """What is wrong with the answer of `command` in `folder`; None if nothing."""
    output = folder / "said"
    process = SERVER.Process(target=started, args=(["-m", *command], folder, output))
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
        return f"it takes longer than {PATIENCE} s"
    said = output.read_text(errors="replace")
    lines = [line for line in said.splitlines() if line.strip() and not line.endswith(": starting")]
    if process.exitcode not in (0, 1, 2) or "Traceback" in said or (process.exitcode and not lines):
        return f"exit code {process.exitcode}: {said[-1500:]}"
    return None if (folder / "precious").read_text() == "precious" else "it has written through a link"


def attack(
    kind: str, commands: dict[str, list[str]], paths: list[str], build: Callable[[Path], None], at: Path
) -> None:
    draw, failed = random.Random(SEED), []
    for number in range(ATTACKS):
        command, path, planted = draw.choice(list(commands)), draw.choice(paths), draw.choice(list(PLANTED))
        here = at / str(number)
        here.mkdir()
        (here / "precious").write_text("precious")
        build(here)
        plant(here / path, planted)
        begin = time.monotonic()
        if wrong := answer(commands[command], here):
            failed.append(f"{command}, {planted} at {path}, after {time.monotonic() - begin:.0f} s: {wrong}")
        shutil.rmtree(here)
    print(f"{kind}: tried {ATTACKS}, held {ATTACKS - len(failed)}, failed {len(failed)}")
    assert not failed, "\n".join(failed)


def of_a_model(folder: str, scored: list[str], text: list[str]) -> dict[str, list[str]]:
    given = f"checkpoint={folder}"
    return {
        "evaluate": ["sparsellm.evaluate", given, *scored, "limit=2", "validation=false"],
        "analyze": ["sparsellm.analyze", given, "sequences=2", "device=cpu", "recordings=recorded", *text],
        "generate": ["sparsellm.generate", given, "prompt=why", "tokens=2", "device=cpu"],
        "push": ["sparsellm.push", given, "repo=a/b", "license=mit", "dry_run=true"],
        "benchmark": ["sparsellm.benchmark", given, "device=cpu", "seconds=0.01", "sequences=1", "prompts=1",
                      "new_tokens=3", "prompt_tokens=4", "micro_batch_size=1", *text],
        "import_model": ["sparsellm.import_model", given, "output_dir=imported"],
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_in_anothers_hands(prepared, trained, scored, tmp_path):
    commands = of_a_model(RUN, scored, []) | {"train": ["sparsellm.train", *prepared, "run.name=r"]}
    paths = [*IN_A_RUN, *(f"checkpoints/{LAST[-13:]}/{name}" for name in IN_A_CHECKPOINT)]
    paths += [f"checkpoints/{LAST[-13:]}/hf/{name}" for name in IN_A_MODEL]
    attack(
        "a run folder in another's hands", commands, [f"{RUN}/{path}".rstrip("/") for path in paths],
        lambda here: kills.copy(trained, here), tmp_path,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_goes_on_in_anothers_hands(prepared, trained, tmp_path):
    """The last checkpoint is removed, so that the run resumes from the previous one."""

    def build(here):
        kills.copy(trained, here)
        shutil.rmtree(here / LAST)

    before = LAST.replace("12", "08")
    paths = [*(f"{RUN}/{name}" for name in IN_A_RUN), *(f"{before}/{name}" for name in IN_A_CHECKPOINT)]
    command = {"train": ["sparsellm.train", *prepared, "run.name=r"]}
    attack("a resumed run in another's hands", command, [path.rstrip("/") for path in paths], build, tmp_path)


@pytest.mark.slow
def test_a_model_in_anothers_hands(trained, scored, tmp_path):
    def build(here):
        shutil.copytree(trained / LAST / "hf", here / "model")
        (here / "text.txt").write_text("why water stone bird " * 200)

    paths = [*(f"model/{name}" for name in IN_A_MODEL), "imported", "imported.partial", "recorded", "text.txt"]
    commands = of_a_model("model", scored, ["text=text.txt"])
    attack("a model in another's hands", commands, [path.rstrip("/") for path in paths], build, tmp_path)
