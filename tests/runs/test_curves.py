"""The figures of a run: their axes, for any number of layers and rows."""

import matplotlib
import pytest
from small_run import small_config
from whole_config import curves_of

from sparsellm.figures import STYLE
from sparsellm.runs import curves
from sparsellm.runs.layout import LOSS_PLOT

pytestmark = pytest.mark.draws


def rows(layers, steps, relu=True):
    """Every tenth step of a run; loss and nonzeros fall, and from step 100 on neurons are dead."""
    return [
        {
            "step": step, "ce": 3 + 100 / (step + 10), "loss": 3.1 + 100 / (step + 10),
            "val_ce": 3.2 + 100 / (step + 10) if step % 50 == 0 else None, "l1_coefficient": 0.01 if relu else 0.0,
            "nnz_per_layer": [24 / (1 + step) + layer for layer in range(layers)] if relu else None,
            "nnz_mean": 24 / (1 + step) if relu else None,
            "dead_per_layer": [min(48, layer) * (step >= 100) for layer in range(layers)] if relu else None,
            "lr": 1e-3, "grad_norm": 10 / step, "tokens_per_s": 1e5,
        }
        for step in [1, *range(10, steps + 1, 10)]
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def styled():
    with matplotlib.rc_context(STYLE):
        yield


@pytest.fixture
def config():
    return small_config("run.name=smoke-relu-3f2a91c0", "sparsity.dead_after_tokens=128")


def colour_bar(figure):
    return [axes for axes in figure.axes if axes.get_ylabel() == "layer"]


@pytest.mark.parametrize("layers", [4, 38])
def test_layers_are_a_colour_scale_beside_the_curves_and_not_a_legend(config, layers):
    pictures = curves_of(config)
    for draw in (pictures.nonzeros, pictures.dead_neurons):
        figure = draw(rows(layers, 200))
        axes, (bar,) = figure.axes[0], colour_bar(figure)
        legend = axes.get_legend()
        assert legend is None or [text.get_text() for text in legend.get_texts()] == ["mean of layers"]
        assert len({line.get_color() if isinstance(line.get_color(), str) else tuple(line.get_color())
                    for line in axes.get_lines()}) >= layers  # fmt: skip
        assert len(bar.get_yticks()) <= 10
        assert figure.get_suptitle() == "smoke-relu-3f2a91c0"


def test_dead_neurons_are_a_share_with_its_window_from_zero(config):
    axes = curves_of(config).dead_neurons(rows(4, 200)).axes[0]
    assert " ".join(axes.get_ylabel().split()) == "fraction of 48 neurons inactive for the last 128 tokens"
    assert axes.get_ylim()[0] == 0
    assert axes.get_lines()[3].get_ydata()[-1] == pytest.approx(3 / 48)
    assert axes.yaxis.get_major_formatter()(0.05, 0) == "5%"
    none_dead = curves_of(config).dead_neurons(rows(4, 50)).axes[0]
    assert none_dead.get_ylim() == (0, pytest.approx(0.055, abs=0.05))


def test_neurons_are_drawn_only_where_they_can_count_as_dead(config):
    config.sparsity.dead_after_tokens = 128 * 100
    line = curves_of(config).dead_neurons(rows(4, 200)).axes[0].get_lines()[0]
    assert min(line.get_xdata()) == 100
    assert curves.DEAD not in curves_of(config).draw(rows(4, 90))


def test_learning_rate_gradient_norm_and_throughput_have_a_panel_each(config):
    run = rows(4, 200)
    run[3]["grad_norm"] = None  # a skipped step
    rate, norm, speed = curves_of(config).training(run).axes
    assert [axes.get_title(loc="left") for axes in (rate, speed)] == ["learning rate", "tokens/s"]
    assert (rate.get_ylim()[0], norm.get_yscale(), speed.get_ylim()[0]) == (0, "log", 0)
    assert list(speed.get_lines()[0].get_ydata()) == [1e5] * 21


def test_nonzeros_say_of_how_many_in_plain_numbers(config):
    axes = curves_of(config).nonzeros(rows(4, 200)).axes[0]
    assert axes.get_ylabel() == "nonzeros per token, of 48"
    assert axes.get_yscale() == "log"
    assert axes.yaxis.get_major_formatter()(2_000, 0) == "2,000"


def test_losses_begin_at_zero_and_are_told_apart_after_the_warm_up(config):
    run = rows(4, 400)
    whole, settled = curves_of(config).losses(run).axes
    assert whole.get_ylim()[0] == 0
    assert settled.get_title(loc="left") == "after the warm-up"
    low, high = settled.get_ylim()
    assert min(row["ce"] for row in run) > low > 3
    assert high < 9
    for axes in (whole, settled):
        held_out = next(line for line in axes.get_lines() if line.get_label() == "held-out")
        training = next(line for line in axes.get_lines() if line.get_label() == "training")
        assert held_out.get_zorder() > training.get_zorder()
        assert (held_out.get_marker(), training.get_alpha()) == ("o", 0.6)
        assert list(held_out.get_xdata()) == [50, 100, 150, 200, 250, 300, 350, 400]


def test_one_row_is_a_point(config):
    (axes,) = curves_of(config).losses(rows(4, 1)).axes
    assert {line.get_marker() for line in axes.get_lines()} == {"o"}
    assert curves_of(config).draw(rows(4, 1)).keys() == {"training.png", "loss.png", "nonzeros.png", "dead_neurons.png"}


def test_a_dense_run_has_its_losses_alone_and_a_step_without_a_loss_is_a_gap(config):
    run = rows(4, 60, relu=False)
    run[2]["ce"] = run[2]["loss"] = None
    assert curves_of(config).draw(run).keys() == {"training.png", "loss.png"}
    diverged = [row | {"ce": None, "loss": None, "val_ce": None} for row in run]
    assert curves_of(config).draw(run[:1] + diverged[1:]).keys() == {"training.png", "loss.png"}
    assert [line.get_label() for line in curves_of(config).losses(run).axes[0].get_lines()] == ["training", "held-out"]


@pytest.mark.parametrize(("relu", "terms"), [(True, "the L1 term and the teacher's"), (False, "the teacher's")])
def test_the_loss_of_a_run_with_a_teacher_is_drawn_by_the_name_of_its_terms(relu, terms):
    taught = small_config("run.name=a", "distill.teacher=x")
    labels = [line.get_label() for line in curves_of(taught).losses(rows(4, 60, relu)).axes[0].get_lines()]
    assert labels == [f"training, with {terms}", "training", "held-out"]


def test_the_same_rows_give_the_same_bytes(config):
    assert curves_of(config).draw(rows(2, 50)) == curves_of(config).draw(rows(2, 50))


@pytest.mark.parametrize("steps", [1, 200])
def test_the_names_of_a_mix_lie_within_the_picture_and_one_validation_is_a_point(steps):
    mix = "[{data: fineweb_edu_of_2024, weight: 0.7}, {data: code_with_comments, weight: 0.3}]"
    mixed = small_config("run.name=a", f"data.mix={mix}")
    run = rows(4, steps)
    for row in run:
        row["val_ce"] = 3.3 if row["step"] == run[-1]["step"] else None
        row |= {f"validation_ce/{name}": row["val_ce"] for name in mixed.data.mix_names}
    figure = curves_of(mixed).losses(run)
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 5
    figure.canvas.draw()
    inside = legend.get_window_extent()
    assert figure.bbox.x0 <= inside.x0
    assert inside.x1 <= figure.bbox.x1
    named = [line for line in figure.axes[0].get_lines() if line.get_label().startswith("held-out")]
    assert len(named) == 3
    assert all(line.get_marker() != "None" for line in named)


@pytest.mark.filterwarnings("error")
def test_runs_in_which_nothing_fires_or_little_is_known_are_drawn(config, capsys):
    known = rows(2, 60)
    silent = [{**row, "nnz_per_layer": [0.0, 0.0], "nnz_mean": 0.0, "dead_per_layer": [48, 48]} for row in known]
    each = {LOSS_PLOT, curves.NONZEROS, curves.DEAD, curves.TRAINING}
    assert set(curves_of(config).draw(silent)) == set(curves_of(config).draw(silent[:1])) == each
    unknown = [{**row, "dead_per_layer": None} for row in known]
    assert set(curves_of(config).draw(unknown)) == each - {curves.DEAD}
    assert set(curves_of(config).draw([{**row, "ce": None, "loss": None, "val_ce": None} for row in known])) > {
        LOSS_PLOT
    }
    assert capsys.readouterr().err == ""
