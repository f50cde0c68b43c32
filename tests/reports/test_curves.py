import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from doppler_jax.reports.curves import Line, Panel, _style, plot_curves
from doppler_jax.reports.gantt import PALETTE

LABELS = {"x_label": "tasks", "y_label": "time (s)"}


def share_of(picture, colour):
    """Returns the share of the picture's pixels that have the colour."""
    return np.mean(np.abs(picture[..., :3] - np.array(to_rgb(colour))).max(axis=-1) < 0.02)


def test_every_line_has_its_colour_in_every_panel(tmp_path):
    x = np.array([1, 10, 100])
    lines = (Line("a", x, np.ones(3)), Line("b", x, 2.0 * x, 1.0 * x, 3.0 * x))
    shares = []
    for count, panels in ((0, (lines[:1],)), (1, (lines,)), (2, (lines[:1], lines[1:]))):
        path = tmp_path / f"{count}.png"
        plot_curves(path, [Panel("p", p, ("best", 1.5)) for p in panels], log_y=True, **LABELS)
        picture = matplotlib.image.imread(path)
        shares.append([share_of(picture, PALETTE[k]) for k in range(3)])
    assert shares[0][0] > 1e-3
    assert shares[0][1] < 1e-4
    assert min(shares[1][:2]) > 1e-3
    assert min(shares[2][:2]) > 1e-3  # the second panel's line is not drawn as the first's
    assert max(share[2] for share in shares) < 1e-4


def test_styles_stay_unique_beyond_the_palette():
    styles = [tuple(_style(k).values()) for k in range(3 * len(PALETTE))]
    assert len(set(styles)) == len(styles)


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ([], "panels is empty"),
        ([Panel("p", (Line("a", np.ones(2), np.ones(3)),))], "'p', line 'a'.*expected as many"),
        ([Panel("p", (Line("a", np.ones(0), np.ones(0)),))], "expected as many"),
        ([Panel("p", (Line("a", np.zeros(1), np.ones(1)),))], "x above 0"),
        ([Panel("p", (Line("a", np.ones(1), np.array([np.nan])),))], "finite numbers"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, panels, message):
    with pytest.raises(ValueError, match=message):
        plot_curves(tmp_path / "no.png", panels, **LABELS)
    assert not list(tmp_path.iterdir())
