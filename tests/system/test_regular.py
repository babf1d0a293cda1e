"""Files in a folder that others may write to: links are not followed for writing, and only regular files are opened."""

import os
from pathlib import Path

import pytest

from sparsellm.system import locks, regular
from sparsellm.system.files import read_json, write_whole


def victim(folder: Path) -> Path:
    path = folder / "victim"
    path.write_text("precious")
    return path


# What is in place of a file, by the message about it.
PLANTED = {
    "a link, and links are not followed": lambda path: path.symlink_to(path.parent / "victim"),
    "a link, and links are not followed ": lambda path: path.symlink_to(path.parent / "nothing"),
    "a link, and links are not followed  ": lambda path: path.symlink_to(path),
    "a FIFO, a socket or a device": os.mkfifo,
    "a folder": os.mkdir,
}


@pytest.mark.parametrize("mode", ["w", "a", "ab", "wb", "r+b"])
@pytest.mark.parametrize("what", PLANTED)
def test_what_is_no_file_is_not_written_to(tmp_path: Path, what: str, mode: str) -> None:
    untouched = victim(tmp_path)
    PLANTED[what](tmp_path / "x")
    with pytest.raises(OSError, match=what.strip() if what != "a folder" else "older|irectory"):
        regular.to_write(tmp_path / "x", mode)
    assert untouched.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_files_are_opened_as_open_does(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for mode, content in [("w", "one"), ("w", "1"), ("a", "2"), ("r+", "3")]:
        with regular.to_write(path, mode) as file:
            file.write(content)
    assert regular.content(path) == b"32"
    umask = os.umask(0o027)
    try:
        regular.to_write(tmp_path / "y", "w").close()
    finally:
        os.umask(umask)
    assert (tmp_path / "y").stat().st_mode & 0o777 == 0o640


def test_a_folder_may_be_a_link_and_so_may_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    write_whole(tmp_path / "runs" / "x", "whole")
    (tmp_path / "runs" / "y").symlink_to("x")
    assert regular.content(tmp_path / "runs" / "y") == b"whole"


@pytest.mark.parametrize("what", PLANTED)
def test_a_file_that_is_written_whole_takes_the_place_of_what_was_planted(tmp_path: Path, what: str) -> None:
    """At its own name or at that of the partial file. A folder is refused."""
    untouched = victim(tmp_path)
    for name in ("x", "y.partial"):
        PLANTED[what](tmp_path / name)
    for name in ("x", "y"):
        if what == "a folder":
            with pytest.raises(OSError, match="directory"):
                write_whole(tmp_path / name, "whole")
        else:
            write_whole(tmp_path / name, "whole")
            assert (tmp_path / name).read_text() == "whole"
            assert not (tmp_path / name).is_symlink()
    assert untouched.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_the_second_name_of_a_file_is_not_written_through(tmp_path: Path) -> None:
    untouched = victim(tmp_path)
    os.link(untouched, tmp_path / "x.partial")
    write_whole(tmp_path / "x", "whole")
    assert (untouched.read_text(), (tmp_path / "x").read_text()) == ("precious", "whole")


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "x.partial").write_text("half of what is longer")
    write_whole(tmp_path / "x", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "whole"


def test_what_cannot_be_a_small_file_is_a_sentence_at_once(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 10**10)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    said = {"sparse": "10,000,000,000 bytes", "fifo": "a FIFO", "device": "a device", "loop": "symbolic links"}
    for name, what in said.items():
        with pytest.raises(ValueError, match=what) as refusal:
            read_json(tmp_path / name, ValueError, "restore it")
        assert "\n" not in str(refusal.value)


def test_locks_hold_on_files_opened_so(tmp_path: Path) -> None:
    with regular.to_write(tmp_path / "lock", "w") as one, regular.to_write(tmp_path / "lock", "w") as other:
        assert locks.take(one)
        assert not locks.take(other, give_up=lambda: True)
