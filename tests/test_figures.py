"""Code shared by all figures."""

import matplotlib
from matplotlib.figure import Figure

from sparsellm import figures


def test_numbers_are_written_plainly():
    assert [figures.written(value) for value in (20_000, 1_000, 50, 0.05, 0)] == ["20,000", "1,000", "50", "0.05", "0"]
    axes = Figure().subplots()
    axes.set(yscale="log", ylim=(1, 5_000))
    figures.plain(axes.yaxis)
    assert [axes.yaxis.get_major_formatter()(value, 0) for value in (1, 1_000)] == ["1", "1,000"]
    figures.percent(axes.yaxis)
    assert axes.yaxis.get_major_formatter()(0.125, 0) == "12.5%"


def test_layers_have_colours_of_their_own_and_a_bar_with_few_ticks():
    for layers in (1, 8, 38):
        figure = Figure()
        colors = figures.layer_colors(figure.subplots(), layers)
        assert len({tuple(color) for color in colors}) == layers
        bar = figure.axes[1]
        assert bar.get_ylabel() == "layer"
        assert all(0 <= tick < layers and tick == int(tick) for tick in bar.get_yticks())
        assert len(bar.get_yticks()) <= 10


def test_an_axis_from_zero_has_some_height():
    axes = Figure().subplots()
    axes.plot([1, 2], [0, 0])
    figures.from_zero(axes, least=0.2)
    assert axes.get_ylim() == (0, 0.2)


def test_the_label_of_guessing_lies_outside_the_axes_and_inside_the_figure():
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot([1, 2], [0.3, 0.4])
    figures.chance_line(axes, 0.306, "chance")
    figure.canvas.draw()
    (label,) = axes.texts
    assert axes.bbox.x1 < label.get_window_extent().x0 < label.get_window_extent().x1 <= figure.bbox.x1


def test_the_same_picture_has_the_same_bytes_and_no_date():
    def picture(kind):
        with matplotlib.rc_context(figures.STYLE):
            figure = Figure()
            figure.subplots().plot([1, 2], [3, 4])
            return figures.saved(figure, kind)

    for kind in ("png", "pdf"):
        assert picture(kind) == picture(kind)
        assert b"Matplotlib" not in picture(kind)
