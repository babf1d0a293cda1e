"""Rows and their file."""

import json
from dataclasses import replace

import pytest
import xxhash

from sparsellm.config import ModelConfig
from sparsellm.runs.metrics import METRICS, MetricsError, MetricsFile, Saved, history, read
from sparsellm.runs.mfu import mfu


def test_mfu_is_the_designs():
    """DESIGN §6: 152k tokens/s of the 0.5B model are 50% of an H200."""
    model = ModelConfig(num_layers=8)
    assert mfu(152_000, model, 2_048, 989e12) == pytest.approx(0.50, abs=0.005)
    assert mfu(152_000, model, 2_048, 8 * 989e12) == pytest.approx(0.50 / 8, abs=0.001)


def test_mfu_counts_what_is_multiplied():
    """An embedding beside an output matrix is looked up; attention's products are as wide as the heads of queries."""
    model = ModelConfig(vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=2)
    grouped = replace(model, tie_embeddings=False, num_key_value_heads=1, head_dim=6)
    both = 100 * 8 + 3 * (3 * 8 * 16 + 2 * 8) + 8
    assert mfu(1, model, 32, 1) == 6 * (both + 3 * 4 * 8 * 8 + 3 * 32 * 8)
    assert mfu(1, grouped, 32, 1) == 6 * (both + 3 * 2 * 8 * (12 + 6) + 3 * 32 * 12)


def test_the_file_begins_anew_after_the_last_step(tmp_path):
    path = tmp_path / METRICS
    path.write_text(rows(1, 10, 20) + '{"step": 3')
    file = MetricsFile(path, last_step=10, saved=saved_with(1, 10))
    file.write({"step": 11})
    file.sync()
    assert path.read_text() == rows(1, 10) + '{"step": 11}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.write({"loss": float("nan")})


def rows(*steps):
    return "".join(json.dumps({"step": step, "loss": step / 3}) + "\n" for step in steps)


def saved_with(*steps):
    """What a checkpoint records of a file with these rows."""
    content = rows(*steps).encode()
    return Saved(len(content), xxhash.xxh3_64_hexdigest(content))


DAMAGES = {
    "garbage": (b"x{]\n", "line 3: it is not JSON"),
    "blank": (b"\n", "line 3: it is blank"),
    "NUL": (b"\0" * 40 + b"\n", "line 3: it is not JSON"),
    "not UTF-8": (b'{"step": 7, "loss": "\xff"}\n', "line 3: byte 22 is not UTF-8"),
    "without a key": (b'{"loss": 1}\n', "line 3: it has no step"),
    "a list": (b"[1]\n", "line 3: it holds a JSON list: it should hold an object"),
    "another kind": (b'{"step": 7, "loss": "low"}\n', "line 3: its loss cannot be 'low'"),
    "out of order": (b'{"step": 3}\n', "line 3: its step 3 comes after step 5"),
    "deep": (b"[" * 100_000 + b"\n", "line 3: it is not JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_row_is_named_by_its_line_and_left_out_only_on_request(tmp_path, damage, capsys):
    path, (line, words) = tmp_path / METRICS, DAMAGES[damage]
    whole = rows(1, 5).encode() + line + rows(10, 20).encode()
    path.write_bytes(whole)
    with pytest.raises(MetricsError) as refused:
        MetricsFile(path, 10, saved_with(1, 5, 10))
    assert f"{path} is damaged: {words}" in str(refused.value)
    assert "run.skip_damaged=true" in str(refused.value)
    assert path.read_bytes() == whole

    assert [row["step"] for row in read(path)] == [1, 5, 10, 20]
    assert f"{path} is damaged: {words}; these lines are skipped" in capsys.readouterr().err

    MetricsFile(path, 10, saved_with(1, 5, 10), skip_damaged=True).close()
    assert [row["step"] for row in read(path)] == [1, 5, 10]
    assert (tmp_path / f"{METRICS}.damaged").read_bytes() == whole
    assert "kept 3 rows, and renamed" in capsys.readouterr().err


@pytest.mark.parametrize("left", [None, b"", b'{"step'], ids=["missing", "empty", "torn"])
def test_rows_that_are_gone_are_not_lost_without_a_word(tmp_path, left):
    path = tmp_path / METRICS
    file = MetricsFile(path, last_step=0)
    file.write({"step": 1})
    saved = file.saved()
    path.unlink() if left is None else path.write_bytes(left)
    with pytest.raises(MetricsError, match="restore the file"):
        MetricsFile(path, last_step=4, saved=saved)
    MetricsFile(path, last_step=4, saved=saved, skip_damaged=True).write({"step": 5})
    assert read(path) == [{"step": 5}]


def test_a_changed_number_is_found_by_what_the_checkpoint_knows(tmp_path):
    path = tmp_path / METRICS
    file = MetricsFile(path, last_step=0)
    file.write({"step": 1, "loss": 10.5})
    saved = file.saved()
    file.write({"step": 2, "loss": 9.5})
    path.write_text(path.read_text().replace("9.5", "8.5"))  # after the checkpoint: cut off
    MetricsFile(path, last_step=1, saved=saved).close()
    assert read(path) == [{"step": 1, "loss": 10.5}]
    path.write_text(path.read_text().replace("10.5", "20.5"))
    assert "differ from those that were saved" in history(path, saved).report(path)
    with pytest.raises(MetricsError, match="differ from those that were saved"):
        MetricsFile(path, last_step=1, saved=saved)


def test_damage_after_the_checkpoint_is_cut_off_with_what_is_trained_again(tmp_path, capsys):
    path = tmp_path / METRICS
    path.write_bytes(rows(1, 10, 20).encode() + b"\0" * 100 + b"\n")
    MetricsFile(path, 10, saved_with(1, 10)).close()
    assert [row["step"] for row in read(path)] == [1, 10]
    assert "removed 1 row that the resumed run will write again" in capsys.readouterr().err


def test_a_file_that_grew_by_a_terabyte_of_zeros_is_not_read_to_its_end(tmp_path):
    path = tmp_path / METRICS
    path.write_bytes(rows(1, 10).encode())
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    assert history(path, saved_with(1, 10)).problems == [
        "line 3: it is longer than 16,777,216 bytes; later lines are not read"
    ]
    MetricsFile(path, 10, saved_with(1, 10)).close()
    assert path.read_text() == rows(1, 10)
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(MetricsError, match="line 1: it is longer than"):
        MetricsFile(path, 10, saved_with(1, 10))


def test_a_row_with_a_number_beyond_every_float_is_named(tmp_path):
    path = tmp_path / METRICS
    path.write_text(rows(1) + f'{{"step": 2, "loss": {10**400}}}\n')
    assert "line 2: " in history(path).problems[0]


def test_a_row_that_finds_no_room_waits_for_the_next_one_and_leaves_no_half_of_itself(tmp_path):
    path = tmp_path / METRICS
    file = MetricsFile(path, last_step=0)
    file.write({"step": 1})
    whole, written = file._file, []

    class Full:
        """Accepts three bytes of a row, and no more."""

        def write(self, content):
            if written:
                written.clear()
                raise OSError(28, "No space left on device")
            written.append(whole.write(content[:3]))
            return 3

        def __getattr__(self, name):
            return getattr(whole, name)

    file._file = Full()
    with pytest.raises(OSError, match="No space left"):
        file.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n'
    file._file = whole
    file.write({"step": 3})
    assert [row["step"] for row in read(path)] == [1, 2, 3]
    assert history(path, file.saved()).problems == []
