"""kill -9 of a command and of what it starts, at random instants and calls to the system; then the same command again.

A command is killed in a folder of its own, once or twice, and started again without any repair. It has to end with 0,
and with the files that the command leaves in another folder where nobody disturbs it.
"""

import hashlib
import json
import math
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attack.seed import ALL, SEED
from logged_rows import untimed
from processes import PATIENCE, SERVER, dying, family, kill, started

from sparsellm.data import corpus
from sparsellm.runs.layout import VALUES, WAITING_ROW
from sparsellm.runs.metrics import METRICS

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
# Files that contain times, or checksums of files that do.
TELLS_TIME = ("COMMITTED", ".metadata", "lock", "verified.json", "sweep.json", "training.png")


@dataclass(frozen=True)
class Kill:
    """Kills process `name` before its call number `call` or, with `size`, in the next write that passes `size` bytes.

    Without a call, kills "the first" process, "one under it" or "all", some seconds after the start.
    """

    name: str
    seconds: float | None = None
    call: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class Undisturbed:
    """What an undisturbed command did."""

    seconds: float
    calls: dict[str, int]  # number of calls that change files, by process name
    left: dict[str, object]


def _prepare(kill: Kill | None, counts: Path | None, name: str) -> None:
    corpus.CHUNK_CHARACTERS = 2_000  # so that a small corpus has many
    if counts is not None:
        dying(None, count=counts / name)
    elif kill is not None and kill.call is not None and kill.name == name:
        dying(kill.call, kill.size)


def start(command: list[str], folder: Path, kill: Kill | None = None, counts: Path | None = None):
    process = SERVER.Process(target=started, args=(command, folder, said(folder), partial(_prepare, kill, counts)))
    process.start()
    return process


def said(folder: Path) -> Path:
    """The file with the output of all commands in `folder`."""
    return folder.with_name(f"{folder.name}.said")


def left(folder: Path) -> dict[str, object]:
    """{path: content} of `folder`; files that contain times are not compared by content."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or path.name in TELLS_TIME or path.parent.name == "logs":
            found[name] = "there"
        elif path.name == METRICS:
            found[name] = [untimed(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name == VALUES:
            values = json.loads(path.read_text())
            row = values[WAITING_ROW] and untimed(values[WAITING_ROW])
            found[name] = values | {"metrics": "their checksum", WAITING_ROW: row}
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def unlike(folder: Path, plain: dict[str, object], *, stopped: bool) -> list[str]:
    """What differs in `folder` from the undisturbed run's. A run that was `stopped` by a signal, or whose torchrun was
    killed, saves a checkpoint at that step, which takes the place of an older one: older ones are then not compared."""
    found = left(folder)
    names = [name for name in sorted(found.keys() | plain) if found.get(name) != plain.get(name)]
    last = max((name for name in plain if re.fullmatch(r".*/checkpoints/step_\d+", name)), default="")
    return [name for name in names if not (stopped and "/checkpoints/step_" in name and not name.startswith(last))]


def undisturbed(command: list[str], setup: Callable[[Path], object], folder: Path) -> Undisturbed:
    folder.mkdir()
    setup(folder)
    counts = folder.with_name("calls")
    counts.mkdir()
    begin = time.monotonic()
    process = start(command, folder, counts=counts)
    process.join(PATIENCE)
    assert process.exitcode == 0, said(folder).read_text()
    seconds = time.monotonic() - begin
    return Undisturbed(seconds, {path.name: path.stat().st_size for path in counts.iterdir()}, left(folder))


def copy(trained: Path, folder: Path) -> None:
    """Copy the runs of `trained` into `folder`."""
    shutil.copytree(trained / "runs", folder / "runs")


def drawn(draw: random.Random, plain: Undisturbed) -> Kill:
    if draw.random() < 1 / 3:
        names = ["the first"] if len(plain.calls) == 1 else ["the first", "one under it", "all"]
        return Kill(draw.choice(names), seconds=round(draw.uniform(0, plain.seconds), 3))
    name = draw.choice(sorted(name for name in plain.calls if plain.calls[name]))
    size = int(10 ** draw.uniform(0, 4)) if draw.random() < 1 / 3 else None
    return Kill(name, call=draw.randint(1, plain.calls[name]), size=size)


def killed(command: list[str], folder: Path, how: Kill, draw: random.Random) -> None:
    """Start and kill the command; if torchrun or a sweep outlives it, wait until that has ended."""
    process = start(command, folder, how)
    if how.seconds is not None:
        process.join(how.seconds)
        members = family(process.pid)
        if how.name == "the first":
            members = members[:1]
        elif how.name == "one under it" and len(members) > 1:
            members = [draw.choice(members[1:])]
        kill(members)
    process.join(PATIENCE)
    if process.exitcode is None:
        kill(family(process.pid))
        raise AssertionError(f"it did not end within {PATIENCE} s of {how}")


def attack(kind: str, command: list[str], setup: Callable[[Path], object], folder: Path, count: int) -> None:
    """`count` times, half as often in `make test`: a fresh folder, one kill or two, and the same command again."""
    count = count if ALL else math.ceil(count / 2)
    plain, failed = undisturbed(command, setup, folder / "undisturbed"), []
    for number in range(count):
        draw = random.Random(f"{SEED} {kind} {number}")
        here, kills = folder / str(number), [drawn(draw, plain) for _ in range(draw.choice((1, 1, 2)))]
        here.mkdir()
        setup(here)
        try:
            for how in kills:
                killed(command, here, how, draw)
            again = start(command, here)
            again.join(PATIENCE)
            if again.exitcode is None:
                kill(family(again.pid))
            assert again.exitcode == 0, f"then it ended with {again.exitcode}"
            differ = unlike(here, plain.left, stopped="torch.distributed.run" in command)
            assert not differ, f"then these differ: {differ}"
        except AssertionError as error:
            failed.append(f"{kills}: {error}\n{said(here).read_text()[-2000:]}")
        else:
            shutil.rmtree(here)
    print(f"kills of {kind}: tried {count}, held {count - len(failed)}, failed {len(failed)} (ATTACK_SEED={SEED})")
    assert not failed, "\n".join(failed)
