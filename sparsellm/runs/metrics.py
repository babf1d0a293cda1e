"""metrics.jsonl: a row for each logged step, checked when read, and appended in whole lines."""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from sparsellm.runs.divergence import LossRange
from sparsellm.system import regular
from sparsellm.system.console import quantity, warn
from sparsellm.system.errors import SparsellmError, listed
from sparsellm.system.files import unused, write_whole

METRICS = "metrics.jsonl"
NAMED = "validation_ce/"  # the key validation_ce/NAME is the held-out cross entropy of the data.mix source NAME
LONGEST_ROW = 1 << 24  # bytes; a row for 100 layers has about 10,000. `history` stops reading at a longer line.
NAMED_PROBLEMS = 3  # maximum number of problems listed for a damaged file


class MetricsError(SparsellmError, RuntimeError):
    """metrics.jsonl is damaged or cannot be written."""


class Saved(NamedTuple):
    """Size and checksum of metrics.jsonl when a checkpoint was saved; stored in the checkpoint under "metrics"."""

    bytes: int
    xxh3: str  # checksum of the first `bytes` bytes


class History(NamedTuple):
    """The content of a metrics.jsonl file."""

    rows: list[dict[str, Any]]  # readable rows, ordered by step
    problems: list[str]  # everything else, with line numbers, except a last line truncated by a kill

    def report(self, path: Path) -> str:
        """A message that lists the problems in the file at `path`."""
        return f"{path} is damaged: {listed(self.problems, NAMED_PROBLEMS, '; ')}"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# Validators for each key's value, applied unless the value is null. Keys may be missing, except those in ALWAYS.
KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            "step", "tokens", "val_tokens", "skipped_steps", "wide_segments", "rest_calls", "overflow_tiles",
            "micro_batch_size", "peak_memory_bytes", "ffn_saved_bytes",
        ),
        lambda value: type(value) is int and value >= 0,
    ),
    **dict.fromkeys(
        (
            "loss", "ce", "val_ce", "l1", "nnz_mean", "lr", "l1_coefficient", "grad_norm", "tokens_per_s", "mfu",
            "mj_per_token", "data_wait_fraction", "relu_share", "distill_kl",
        ),
        _is_number,
    ),
    **dict.fromkeys(
        ("nnz_per_layer", "dead_per_layer", "reinitialized_per_layer"),
        lambda value: type(value) is list and all(map(_is_number, value)),
    ),
    "plan_per_layer": lambda value: type(value) is list and all(type(engine) is str for engine in value),
    "evaluation": lambda value: type(value) is dict and "mean" in value and all(
        score is None or _is_number(score) for score in value.values()
    ),
}  # fmt: skip
ALWAYS = ("step",)
# Keys that summaries and curves need in every row.
NEVER_NULL = ("step", "tokens", "tokens_per_s", "l1_coefficient", "skipped_steps")
IN_EVERY_ROW = (
    *NEVER_NULL, "loss", "ce", "val_ce", "val_tokens", "evaluation", "nnz_mean", "nnz_per_layer", "dead_per_layer",
    "reinitialized_per_layer",
)  # fmt: skip


def history(
    path: Path, saved: Saved | None = None, needed: Sequence[str] = ALWAYS, layers: int | None = None
) -> History:
    """The rows in a metrics.jsonl file, and the problems found.

    `saved`: the file's size and checksum when a checkpoint was saved. `needed`: keys that every row must have.
    `layers`: the length that every list in a row must have. A missing file is a problem only if `saved` is not None.
    """
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    size, digest = 0, xxhash.xxh3_64()
    try:
        with regular.to_read(path) as file:
            for number in itertools.count(1):
                line = file.readline(LONGEST_ROW)
                if saved is not None:
                    digest.update(line[: max(0, saved.bytes - size)])
                size += len(line)
                if not line.endswith(b"\n"):  # the end of the file, or a last line truncated by a kill
                    if len(line) == LONGEST_ROW:
                        problems.append(
                            f"line {number}: it is longer than {LONGEST_ROW:,} bytes; later lines are not read"
                        )
                    break
                try:
                    row = _parsed(line[:-1], needed, layers)
                    if rows and row["step"] <= rows[-1]["step"]:
                        raise ValueError(f"its step {row['step']} comes after step {rows[-1]['step']}")
                    rows.append(row)
                except (ValueError, OverflowError) as error:  # OverflowError: an integer too large for a float
                    problems.append(f"line {number}: {error}")
    except FileNotFoundError:
        return History([], [] if saved is None else [f"the file is missing, but {saved.bytes:,} bytes were saved"])
    except OSError as error:
        return History([], [f"it cannot be read ({error.strerror})"])
    if saved is not None and digest.hexdigest() != saved.xxh3:
        if size < saved.bytes and len(line) < LONGEST_ROW:
            problems.append(f"it has {size:,} bytes, but {saved.bytes:,} were saved")
        elif not problems:
            problems.append(f"its first {saved.bytes:,} bytes differ from those that were saved")
    return History(rows, problems)


def _parsed(line: bytes, needed: Sequence[str], layers: int | None) -> dict[str, Any]:
    """Parse a row. Raises ValueError, naming the problem, if the line is not a valid row."""
    if not line.strip():
        raise ValueError("it is blank")
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(row, dict):
        raise ValueError(f"it holds a JSON {type(row).__name__}: it should hold an object")
    for key in dict.fromkeys((*ALWAYS, *needed)):
        if key not in row or (key in NEVER_NULL and row[key] is None):
            raise ValueError(f"it has no {key}")
    for key, is_right in (*KINDS.items(), *((key, _is_number) for key in row if key.startswith(NAMED))):
        value = row.get(key)
        fits = not isinstance(value, list) or layers in (None, len(value))
        if value is not None and not (is_right(value) and fits):
            raise ValueError(f"its {key} cannot be {value!r:.40}")
    return row


def telling(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows used by a model card, ordered by step: the last, the last validated and the last evaluated row.

    Rows with missing keys, which may exist after run.skip_damaged=true, are left out.
    """
    complete = [row for row in rows if all(key in row for key in IN_EVERY_ROW)]
    validated = [row for row in complete if row["val_ce"] is not None]
    evaluated = [row for row in complete if row["evaluation"]]
    last = {row["step"]: row for row in (*complete[-1:], *validated[-1:], *evaluated[-1:])}
    return sorted(last.values(), key=lambda row: row["step"])


def read(path: Path) -> list[dict[str, Any]]:
    """The rows in a metrics.jsonl file. Skips damaged lines with a warning, and silently a truncated last line."""
    found = history(path)
    if found.problems:
        warn(f"{found.report(path)}; these lines are skipped")
    return found.rows


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """A row's numbers by name, for tools that draw one curve per name. A layer's number is named KEY/LAYER."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if key == "plan_per_layer":
            flat["tile_layers"] = value.count("tile")
        elif isinstance(value, list):
            flat |= {f"{key}/{layer:02d}": each for layer, each in enumerate(value)}
        elif isinstance(value, dict):  # the same names as in WandbRun.evaluation
            named = {"step": row["step"], **value}
            flat |= {f"{key}/{name}": each for name, each in named.items() if each is not None}
        elif value is not None:
            flat[key] = value
    return flat


class MetricsFile:
    """metrics.jsonl, truncated after the row for `last_step`, because a resumed run writes later rows again.

    Rows that cannot be written, because the disk is full, are kept in memory and retried with the next row. Another
    thread may read `telling`, the rows that the model card uses. `loss_range` covers the rows up to `last_step`.
    """

    def __init__(self, path: Path, last_step: int, saved: Saved | None = None, skip_damaged: bool = False) -> None:
        """`saved`: length and hash of the file, as stored in the checkpoint of `last_step`; None without a checkpoint.

        Raises MetricsError if rows up to `last_step` are damaged or missing. With `skip_damaged`, readable rows are
        kept, and the damaged file is renamed to metrics.jsonl.damaged, with a warning.
        """
        self.path = path
        found = history(path, saved)
        kept = [row for row in found.rows if row["step"] <= last_step]
        content = b""
        if saved is not None:
            with suppress(FileNotFoundError), regular.to_read(path) as file:
                content = file.read(min(saved.bytes, os.fstat(file.fileno()).st_size))
        if saved is not None and xxhash.xxh3_64_hexdigest(content) != saved.xxh3:
            what = found.report(path)
            if not skip_damaged:
                raise MetricsError(
                    f"{what}. The checkpoint to resume from is intact: restore the file, or continue with the"
                    f" {quantity(len(kept), 'readable row')} with run.skip_damaged=true, which keeps a copy of the"
                    " damaged file"
                )
            aside = unused(path.with_name(path.name + ".damaged"))
            if path.exists():
                path.rename(aside)
            warn(f"{what}; kept {quantity(len(kept), 'row')}, and renamed the damaged file to {aside.name}")
            content = b"".join(map(_line, kept))
        elif len(found.rows) > len(kept):
            cut = len(found.rows) - len(kept)
            warn(f"{path}: removed {quantity(cut, 'row')} that the resumed run will write again")
        write_whole(path, content)
        self._file = regular.to_write(path, "r+b", buffering=0)
        self._bytes, self._digest = len(content), xxhash.xxh3_64(content)  # size and hash of the file so far
        self.telling = telling(kept)
        self.loss_range = LossRange(kept)
        self.waiting: list[bytes] = []  # rows that could not be written yet

    def write(self, row: dict[str, Any]) -> None:
        """Append `row`. Raises OSError if the file cannot be written; `sync` or the next `write` retries the row."""
        self.waiting.append(_line(row))
        self.telling = telling([*self.telling, row])
        self._flush()

    def sync(self) -> None:
        """Sync all rows to disk. Call this before a checkpoint is written. Raises OSError if rows cannot be written."""
        self._flush()
        os.fsync(self._file.fileno())

    def is_gone(self) -> bool:
        """Whether the file was removed or replaced, which loses the rows written so far."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True

    def saved(self) -> Saved:
        return Saved(self._bytes, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        while self.waiting:
            line = self.waiting[0]
            self._file.seek(self._bytes)
            written = 0
            try:
                while written < len(line):
                    written += self._file.write(line[written:])
            except OSError:
                self._file.truncate(self._bytes)  # no partial row
                raise
            del self.waiting[0]
            self._bytes += len(line)
            self._digest.update(line)


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()
