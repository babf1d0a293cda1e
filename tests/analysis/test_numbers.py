"""Hand-made counts, with answers computed on paper."""

import numpy as np
import pytest

from sparsellm.analysis import figures, numbers, report
from sparsellm.analysis.activity import Activity


class Letters:
    """A tokenizer of the letters a, b, c, ..."""

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


def constructed():
    """Two sequences of 8 tokens, two layers of 100 neurons. Tokens at the first two positions fire more."""
    blocks = np.array([[0, 1, 2, 2, 1, 1, 0, 2], [2, 2, 1, 0, 0, 1, 2, 1]])
    nonzeros = np.zeros((2, 8, 2), np.int32)
    nonzeros[:, 0] = 90, 70
    nonzeros[:, 1] = 30, 10
    for token, fires in ((0, (2, 2)), (1, (4, 0)), (2, (6, 4))):
        nonzeros[:, 2:][blocks[:, 2:] == token] = fires
    nonzeros[1, 6] = 20, 10  # one c fires three times as much as the others
    # A token with n nonzeros fires the last n neurons.
    fired = (nonzeros[..., None] > np.arange(100)[::-1]).sum((0, 1))
    return Activity(blocks, nonzeros, fired, np.array([30, 1]), 2)


def test_positions():
    rows = numbers.positions(constructed())
    assert [(row["first"], row["last"]) for row in rows] == [(0, 0), (1, 1), (2, 3), (4, 7)]
    assert rows[0]["nonzeros"] == [90, 70]
    assert rows[1]["nonzeros"] == [30, 10]
    # c c and b a; then b b a c and a b c' b
    assert rows[2]["nonzeros"] == [(6 + 6 + 4 + 2) / 4, (4 + 4 + 0 + 2) / 4]
    assert rows[3]["nonzeros"] == [(4 + 4 + 2 + 6 + 2 + 4 + 20 + 4) / 8, (0 + 0 + 2 + 4 + 2 + 0 + 10 + 0) / 8]


def of_means(means):
    """Two layers of one sequence whose nonzeros have these means over layers, by position."""
    pairs = np.stack([np.asarray(means) * 2, np.zeros(len(means))], 1)
    return Activity(np.zeros((1, len(means)), int), pairs[None], np.zeros((2, 9)), np.zeros(2), 1)


@pytest.mark.parametrize("scale", [0.5, 3, 40])
def test_an_exponential_decay_over_positions_is_found_whatever_its_scale(scale):
    fit = numbers.position_fit(of_means(37 + 800 * np.exp(-np.arange(512) / scale)))
    assert [fit[key] for key in ("floor", "amplitude", "scale")] == pytest.approx([37, 800, scale], rel=0.01)
    assert fit["relative_error"] < 0.005


def test_a_fit_says_how_far_the_means_are_from_it():
    means = 40 + 100 * np.exp(-np.arange(256) / 5)
    means[128:] *= np.where(np.arange(128) % 2, 1.2, 0.8)  # averages out within a bin
    assert numbers.position_fit(of_means(means))["relative_error"] < 0.005
    means[64:128] *= 1.5
    assert 0.1 < numbers.position_fit(of_means(means))["relative_error"] < 0.3


@pytest.mark.parametrize("means", [[9, 5, 3, 2], np.zeros(64), [5] * 30 + [0] * 34])
def test_there_is_no_fit_of_few_positions_or_of_positions_where_nothing_fires(means):
    assert numbers.position_fit(of_means(means)) is None


def test_token_classes_are_compared_where_the_sequence_has_settled():
    counted = constructed()
    rows = numbers.token_classes(counted, counted.blocks)  # the tokens a, b, c as the first three classes
    assert [(row["class"], row["tokens"], row["nonzeros"]) for row in rows] == [
        ("URL piece", 3, 2), ("number", 5, 2), ("punctuation", 4, (5 * 3 + 15) / 4),
    ]  # fmt: skip
    assert rows[1]["nonzeros_per_layer"] == [4, 0]


@pytest.mark.parametrize(("length", "edges"), [(1, [0, 1]), (2, [0, 1, 2]), (9, [0, 1, 2, 4, 8, 9]), (4, [0, 1, 2, 4])])
def test_octaves(length, edges):
    assert numbers.octaves(length) == edges


def test_tokens_are_compared_where_the_sequence_has_settled():
    counted = constructed()
    assert numbers.settled(counted) == 2
    types = numbers.token_types(counted)
    assert types == [
        {"id": 0, "count": 3, "nonzeros": 2, "max": 2},
        {"id": 1, "count": 5, "nonzeros": 2, "max": 2},
        {"id": 2, "count": 4, "nonzeros": (5 * 3 + 15) / 4, "max": 15},
    ]
    most, least = numbers.extremes(types, min_count=4)
    assert [row["id"] for row in most] == [2, 1]
    assert [row["id"] for row in least] == [1, 2]
    assert numbers.extremes(types, min_count=6) == ([], [])


def test_the_most_active_occurrences_come_with_their_text():
    found = numbers.occurrences(constructed(), Letters())
    assert len(found) == 12  # all of them, here
    first, second = found[:2]
    assert (first["sequence"], first["position"], first["token"], first["nonzeros"]) == (1, 6, "c", 15)
    assert (first["before"], first["after"]) == ("ccbaab", "b")
    assert (second["sequence"], second["position"], second["nonzeros"]) == (0, 2, 5)  # the first among equals


def test_layers():
    counted = constructed()
    rows = numbers.layers(counted)
    totals = counted.nonzeros.sum((0, 1))
    assert [row["nonzeros"]["mean"] for row in rows] == (totals / 16).tolist()
    assert rows[0]["nonzeros"]["max"] == 90
    assert rows[1]["nonzeros"]["median"] == np.median(counted.nonzeros[..., 1])
    assert [row["zeros"] for row in rows] == [1 - total / 1600 for total in totals]
    assert [row["dead"] for row in rows] == [10, 30]
    assert [row["union_per_tile"] for row in rows] == [15, 0.5]
    assert rows[0]["share_of_top"]["0.01"] == 16 / totals[0]  # one neuron, which fires on all tokens
    assert rows[0]["share_of_top"]["0.05"] == (2 * 16 + 2 * 13 + 8) / totals[0]
    assert rows[0]["frequency_quantiles"]["0.5"] == 2 / 16  # on the two first tokens


def test_a_layer_that_never_fires_has_no_shares():
    silent = Activity(np.zeros((1, 4), int), np.zeros((1, 4, 1), np.int32), np.zeros((1, 8), int), np.zeros(1, int), 1)
    (row,) = numbers.layers(silent)
    assert row["zeros"] == 1
    assert row["dead"] == 8
    assert set(row["share_of_top"].values()) == {None}


def test_neurons_are_ranked_within_their_layer():
    rows = numbers.neurons(constructed())
    assert len(rows) == 200
    assert [row["neuron"] for row in rows[:3]] == [98, 99, 96]  # equal ones by ascending index
    assert [row["fired"] for row in rows[:3]] == [16, 16, 13]
    assert rows[100] == {"layer": 1, "rank": 0, "neuron": 98, "fired": 11, "frequency": 11 / 16}
    assert rows[-1]["fired"] == 0


@pytest.mark.parametrize(
    ("speedups", "expected"), [((2.0, 1.5, 1.0), -1), ((1.0, 1.5, 2.0), 1), ((1.0, 1.0, 1.0), None), ((2.0,), None)]
)
def test_correlation(speedups, expected):
    rows = [{"speedup": each, "nonzeros": 10.0 * i} for i, each in enumerate(speedups)]
    found = numbers.correlation(rows)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_a_table_wider_than_the_terminal_goes_on_below_with_its_first_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    rows = [["run", "steps", "nonzeros", "accuracy"], ["a", "40", "12.5", "30.1%"]]
    assert report.aligned(rows) == [
        "run  steps  nonzeros", "  a     40      12.5", "", "run  accuracy", "  a     30.1%",
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    assert report.aligned(rows) == ["run  steps  nonzeros  accuracy", "  a     40      12.5     30.1%"]
    monkeypatch.setenv("COLUMNS", "5")  # too narrow for any table: one column at a time
    assert len(report.aligned(rows)) == 3 * 3 - 1


def test_the_figures_draw_these_numbers(monkeypatch):
    monkeypatch.setattr(figures, "saved", lambda figure: figure)
    counted = constructed()
    rows, fit = numbers.layers(counted), {"floor": 2.0, "amplitude": 78.0, "scale": 1.5}
    classes = numbers.token_classes(counted, counted.blocks)
    most, least = ([{"token": name, "nonzeros": value}] for name, value in (("c", 7.5), ("a", 2.0)))
    speeds = [{"nonzeros": 20.0, "speedup": 2.0}, {"nonzeros": 40.0, "speedup": 1.25}]
    results = {
        "layers": rows, "position_fit": fit, "token_classes": classes,
        "tokens": {"most_active": most, "least_active": least},
        "speed": {"layers": speeds, "correlation_with_nonzeros": -1.0},
    }  # fmt: skip
    panels = {name: figure.axes[0] for name, figure in figures.draw("model", results, counted).items()}
    assert panels.keys() == report.FIGURES.keys()
    lines = {name: {line.get_label(): line.get_ydata() for line in axes.lines} for name, axes in panels.items()}

    by_layer, nonzeros = lines[report.BY_LAYER], [row["nonzeros"] for row in rows]
    assert by_layer["mean"].tolist() == [each["mean"] for each in nonzeros]
    assert by_layer["largest"].tolist() == [each["max"] for each in nonzeros]
    boxes = [patch.get_path().vertices[:-1, 1] for patch in panels[report.BY_LAYER].patches]
    assert [(box.min(), box.max()) for box in boxes] == [(each["p25"], each["p75"]) for each in nonzeros]
    drawn = [set(line.get_ydata().tolist()) for line in panels[report.BY_LAYER].lines]
    assert all({each["median"]} in drawn and {each["p99"], each["p75"]} in drawn for each in nonzeros)

    by_position = lines[report.BY_POSITION]
    assert by_position["mean"][:2].tolist() == [(90 + 70) / 2, (30 + 10) / 2]
    assert by_position[report.fitted(fit)][:2] == pytest.approx([2 + 78, 2 + 78 * np.exp(-1 / 1.5)])

    by_token = panels[report.BY_TOKEN]
    expected = [("'c'", 7.5), *sorted(((row["class"], row["nonzeros"]) for row in classes), key=lambda each: -each[1])]
    names, widths = by_token.get_yticklabels(), [bar.get_width() for bar in by_token.patches]
    assert [(name.get_text(), width) for name, width in zip(names, widths, strict=True)] == [*expected, ("'a'", 2)]

    ranked = [numbers.neurons(counted)[layer * 100 :] for layer in range(2)]
    for line, of_layer in zip(panels[report.FREQUENCY].lines, ranked, strict=True):
        assert line.get_ydata().tolist() == [row["frequency"] for row in of_layer[:100] if row["fired"]]

    heights = [bar.get_height() for bar in panels[report.UNION].patches]
    assert heights == [*(1 - row["dead"] / 100 for row in rows), *(row["union_per_tile"] / 100 for row in rows)]
    assert panels[report.UNION].lines[0].get_ydata().tolist() == [1 - row["zeros"] for row in rows]

    assert panels[report.SPEEDUP].collections[0].get_offsets().tolist() == [[20, 2], [40, 1.25]]
    assert panels[report.SPEEDUP].get_title() == "correlation -1.000"
