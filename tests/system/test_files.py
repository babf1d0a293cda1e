"""Small files: written atomically; any bad content gives one sentence."""

import json
import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from sparsellm.system import files
from sparsellm.system.files import read_json, read_sealed, whole, write_sealed, write_whole


class Damaged(ValueError):
    pass


@pytest.mark.parametrize("content", [
    b"", b" \n", b"\0\0", b"\xff", b"{", b"[]", b"null", b'"x"', b"1" * 5_000, b"[" * 10**5, b'{"a": 1}{',
])  # fmt: skip
def test_what_is_no_object_is_one_sentence_with_the_file_and_the_remedy(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    for reading in (read_json, read_sealed):
        with pytest.raises(Damaged) as refusal:
            reading(path, Damaged, "delete the file")
        assert str(refusal.value).startswith(f"{path} is damaged (")
        assert str(refusal.value).endswith("): delete the file")
        assert "\n" not in str(refusal.value)


def test_missing_and_unreadable_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="x is missing: bring back"):
        read_json(tmp_path / "x", Damaged, "bring back")
    with pytest.raises(Damaged, match=r"cannot be read .*: bring back"):
        read_json(tmp_path, Damaged, "bring back")


def test_a_sealed_file_comes_back_and_is_json_for_everyone(tmp_path: Path) -> None:
    values = {"é": [1, {"xxh3": "abc"}], "none": None, "half": 0.5}
    write_sealed(tmp_path / "x.json", values)
    assert read_sealed(tmp_path / "x.json", Damaged, "") == values
    assert json.loads((tmp_path / "x.json").read_text()).items() > values.items()


def test_no_changed_bit_of_a_sealed_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_sealed(path, {"é": [1, {"xxh3": "abc"}], "none": None, "half": 0.5})
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(Damaged, match="is damaged"):
            read_sealed(path, Damaged, "")


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "x", "before")

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "x", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "before"


def test_who_writes_a_file_waits_for_who_is_writing_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with ThreadPoolExecutor() as threads:
        with whole(path) as file:
            file.write(b"one")
            others = [threads.submit(write_whole, path, content) for content in ("a second one", "a third one")]
            assert not wait(others, timeout=0.3).done
            file.write(b" that takes long")
        assert [other.result() for other in others] == [None, None]
    assert path.read_text() in ("a second one", "a third one")
    assert [left.name for left in tmp_path.iterdir()] == ["x"]
