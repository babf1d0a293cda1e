"""The server from which tests fork their processes."""

import sys

from processes import SERVER


def leave_with_what_is_imported() -> None:
    sys.exit(0 if "tests.warm" in sys.modules else 3)


def test_forked_processes_have_imported_what_saves_them_a_second():
    """The server is silent about a module that it cannot import."""
    process = SERVER.Process(target=leave_with_what_is_imported)
    process.start()
    process.join(60)
    assert process.exitcode == 0
