"""Progress output in a log file."""

import pytest

from sparsellm.system import console


@pytest.mark.parametrize(
    ("every", "lines"),
    [
        (60, ["reading  2,000/2,000 sequences"]),
        (0, ["reading  1,500/2,000 sequences", "reading  2,000/2,000 sequences"]),
    ],
)
def test_a_line_every_few_seconds_and_at_the_end(every, lines, monkeypatch, capfd):
    monkeypatch.setattr(console, "LINE_EVERY", every)
    with console.progress("reading", 2000, "sequence") as advance:
        advance(1500)
        advance(500)
    assert capfd.readouterr().err.splitlines() == lines


def test_nothing_where_it_is_not_shown(monkeypatch, capfd):
    monkeypatch.setattr(console, "LINE_EVERY", 0)
    with console.progress("reading", 2, "sequence", shown=False) as advance:
        advance(2)
    assert capfd.readouterr().err == ""


def test_a_quantity_has_a_plural_unless_it_is_one():
    assert [console.quantity(count, "step") for count in (0, 1, 2_000)] == ["0 steps", "1 step", "2,000 steps"]
