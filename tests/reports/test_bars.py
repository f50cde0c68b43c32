import matplotlib.image
import numpy as np
import pytest

from doppler_jax.reports.bars import Panel, plot_bars
from doppler_jax.reports.gantt import OTHER, PALETTE
from tests.reports.test_gantt import share_of

NAN = np.full(2, np.nan)
LABELS = {"x_label": "makespan (ms)", "other_label": "paper"}


def test_bars_have_the_area_of_their_values(tmp_path):
    panel = Panel("t", ("ours", "theirs"), np.array([3.0, 1.0]), np.zeros(2), NAN, ("ours",))
    plot_bars(tmp_path / "a.png", [panel, panel], **LABELS)
    picture = matplotlib.image.imread(tmp_path / "a.png")
    ours, theirs = share_of(picture, PALETTE[0]), share_of(picture, OTHER)
    assert theirs > 0.02
    assert ours / theirs == pytest.approx(3, rel=0.1)


def test_other_figures_are_marked(tmp_path):
    black = []
    for other in (NAN, np.array([2.0, np.nan])):
        panel = Panel("t", ("a", "b"), np.array([3.0, 1.0]), np.zeros(2), other)
        plot_bars(tmp_path / "a.png", [panel], **LABELS)
        black.append(share_of(matplotlib.image.imread(tmp_path / "a.png"), "black"))
    assert black[1] > black[0]


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ([], "panels is empty"),
        ([Panel("odd", ("a",), np.ones(2), np.ones(2), NAN)], r"'odd': \[1, 2, 2, 2\] bars"),
        ([Panel("bare", (), np.ones(0), np.ones(0), np.ones(0))], "'bare'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, panels, message):
    with pytest.raises(ValueError, match=message):
        plot_bars(tmp_path / "no.png", panels, **LABELS)
    assert not list(tmp_path.iterdir())
