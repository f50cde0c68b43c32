"""Pictures hold what they should: pixels are counted by colour."""

import functools

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

import doppler_jax as dj
from doppler_jax.reports.gantt import draw_gantt, op_type, plot_gantt
from doppler_jax.reports.pictures import (
    OTHER,
    PALETTE,
    Bars,
    Line,
    lay_out,
    line_style,
    plot_bars,
    plot_curves,
    plot_placements,
    plot_scatter,
)
from tests.generators import make_schedule


def share_of(picture, colour):
    """Returns the share of the picture's pixels that have the colour."""
    return np.mean(np.abs(picture[..., :3] - np.array(to_rgb(colour))).max(axis=-1) < 0.01)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("matmul_3[0,1]", "matmul"),
        ("matmul[0,1]", "matmul"),
        ("reduce_sum_12", "reduce_sum"),
        ("conv2d_1_2[0]", "conv2d"),
        ("add", "add"),
    ],
)
def test_op_type(name, op):
    assert op_type(name) == op


def test_bars_have_the_area_of_their_tasks(tmp_path):
    # Blue is busy three times as long as orange, and there are few pixels besides.
    names = ["mul_0[0]", "mul_1[0]", "add_2[0]"]
    schedule = make_schedule([0, 1, 1], [0, 0, 0.2], [0.4, 0.2, 0.4])
    path = tmp_path / "gantt.png"
    plot_gantt(path, [("one", schedule, names)] * 2, num_devices=2)
    picture = matplotlib.image.imread(path)
    blue, orange = share_of(picture, PALETTE[0]), share_of(picture, PALETTE[1])
    assert orange > 0.05
    assert blue / orange == pytest.approx(3, rel=0.1)
    assert share_of(picture, OTHER) < 0.001


def test_names_stand_where_they_fit_and_transfers_join_rows():
    schedule = make_schedule([0, 1], [0, 0.51], [0.5, 0.52], [(0, 0, 1, 0.5, 0.51)])
    figure = draw_gantt([("one", schedule, ["mul_0[0]", "add_1[0]"])], 2)
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.texts] == ["mul_0[0]"]
    (line,) = ax.collections[0].get_segments()
    np.testing.assert_allclose(line, [[500, 0], [510, 1]])  # ms, device
    assert figure.legends[0].texts[-1].get_text() == "transfer"


def test_rare_operations_are_grey(tmp_path):
    n = len(PALETTE) + 1
    schedule = make_schedule(range(n), [0] * n, [1] * n)
    names = [f"op{chr(97 + i)}" for i in range(n)]
    plot_gantt(tmp_path / "a.png", [("t", schedule, names)], num_devices=n)
    picture = matplotlib.image.imread(tmp_path / "a.png")
    shares = [share_of(picture, colour) for colour in (*PALETTE, OTHER)]
    assert min(shares) > 0.02


def test_no_tasks(tmp_path):
    plot_gantt(tmp_path / "a.png", [("empty", make_schedule([], [], []), [])], num_devices=2)
    assert matplotlib.image.imread(tmp_path / "a.png").shape[1] > 0


NAN = np.full(2, np.nan)
BAR_LABELS = {"x_label": "makespan (ms)", "other_label": "paper"}


def test_bars_have_the_area_of_their_values(tmp_path):
    panel = "t", Bars(("ours", "theirs"), np.array([3.0, 1.0]), np.zeros(2), NAN, ("ours",))
    plot_bars(tmp_path / "a.png", [panel, panel], **BAR_LABELS)
    picture = matplotlib.image.imread(tmp_path / "a.png")
    ours, theirs = share_of(picture, PALETTE[0]), share_of(picture, OTHER)
    assert theirs > 0.02
    assert ours / theirs == pytest.approx(3, rel=0.1)


def test_other_figures_are_marked(tmp_path):
    black = []
    for other in (NAN, np.array([2.0, np.nan])):
        panel = "t", Bars(("a", "b"), np.array([3.0, 1.0]), np.zeros(2), other)
        plot_bars(tmp_path / "a.png", [panel], **BAR_LABELS)
        black.append(share_of(matplotlib.image.imread(tmp_path / "a.png"), "black"))
    assert black[1] > black[0]


LINE_LABELS = {"x_label": "tasks", "y_label": "time (s)"}


def test_every_line_has_its_colour_in_every_panel(tmp_path):
    x = np.array([1, 10, 100])
    lines = (Line("a", x, np.ones(3)), Line("b", x, 2.0 * x, 1.0 * x, 3.0 * x))
    shares = []
    for count, panels in ((0, (lines[:1],)), (1, (lines,)), (2, (lines[:1], lines[1:]))):
        path, drawn = tmp_path / f"{count}.png", [("p", p) for p in panels]
        plot_curves(path, drawn, **LINE_LABELS)
        picture = matplotlib.image.imread(path)
        shares.append([share_of(picture, PALETTE[k]) for k in range(3)])
    assert shares[0][0] > 1e-3
    assert shares[0][1] < 1e-4
    assert min(shares[1][:2]) > 1e-3
    assert min(shares[2][:2]) > 1e-3  # the second panel's line is not drawn as the first's
    assert max(share[2] for share in shares) < 1e-4


def test_styles_stay_unique_beyond_the_palette():
    styles = [tuple(line_style(k).values()) for k in range(3 * len(PALETTE))]
    assert len(set(styles)) == len(styles)


def test_points_of_several_panels_are_written(tmp_path):
    points = np.array([1e-3, 2e-3, 4e-3])
    sizes = []
    for count in (1, 4):
        path = tmp_path / f"{count}.png"
        plot_scatter(path, [(f"panel {k}", points, 1.1 * points) for k in range(count)])
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(picture[16:20]))  # width in pixels
    assert sizes[1] > 2 * sizes[0]
    assert {path.name for path in tmp_path.iterdir()} == {"1.png", "4.png"}


EDGES = [(0, 1, 1.0), (0, 2, 1.0), (1, 3, 1.0), (2, 4, 1.0), (3, 5, 1.0), (4, 5, 1.0)]


@pytest.fixture
def graph():
    """Two chains from task 0 to task 5."""
    return dj.from_edge_delays(np.ones(6), EDGES, num_devices=2)[0]


def test_tasks_stand_at_their_level_and_lines_do_not_cross(graph):
    points = lay_out(graph)
    assert points[:, 0].tolist() == [0, 1, 1, 2, 2, 3]
    assert len(np.unique(points, axis=0)) == 6
    assert (points[1, 1] < points[2, 1]) == (points[3, 1] < points[4, 1])


def test_devices_have_the_area_of_their_tasks(tmp_path, graph):
    path = tmp_path / "a.png"
    plot_placements(path, [("t", graph, [0, 0, 0, 0, 1, 1])] * 2, num_devices=2)
    picture = matplotlib.image.imread(path)
    shares = [share_of(picture, colour) for colour in PALETTE[:3]]
    assert shares[0] > 1.4 * shares[1] > 0
    assert shares[2] < 1e-5


def test_many_devices_and_no_tasks(tmp_path, graph):
    plot_placements(tmp_path / "a.png", [("t", graph, np.arange(6) + 3)], num_devices=9)
    empty, _ = dj.from_edge_delays([], [], num_devices=2)
    plot_placements(tmp_path / "b.png", [("t", empty, [])], num_devices=2)
    assert matplotlib.image.imread(tmp_path / "b.png").shape[1] > 0


def bars(values, more=NAN):
    return "odd", Bars(("a",) * len(values), np.ones(len(more)), np.ones(len(more)), more)


def line(x, y):
    return "p", (Line("a", np.array(x, float), np.array(y, float)),)


def points(simulated, measured):
    return "odd", np.ones(simulated), np.ones(measured)


def placed(placement):
    return "t", dj.from_edge_delays(np.ones(6), EDGES, num_devices=2)[0], placement


def ran(placement, start_s=(0, 0), finish_s=(1, 1), names="ab"):
    return "bad", make_schedule(placement, start_s, finish_s), list(names)


DRAW = {
    "bars": functools.partial(plot_bars, **BAR_LABELS),
    "lines": functools.partial(plot_curves, **LINE_LABELS),
    "points": plot_scatter,
    "placements": functools.partial(plot_placements, num_devices=2),
    "gantt": functools.partial(plot_gantt, num_devices=2),
}


@pytest.mark.parametrize(
    ("kind", "panels", "message"),
    [
        *((kind, [], "panels is empty") for kind in DRAW),
        ("bars", [bars("a")], r"'odd': \[1, 2, 2, 2\] bars"),
        ("bars", [bars("", np.ones(0))], "'odd'"),
        ("lines", [line([1, 1], [1, 1, 1])], "'p', line 'a'.*expected as many"),
        ("lines", [line([], [])], "expected as many"),
        ("lines", [line([0], [1])], "x above 0"),
        ("lines", [line([1], [np.nan])], "finite numbers"),
        ("points", [points(2, 3)], "'odd' has 2 simulated and 3 measured"),
        ("points", [points(0, 0)], "'odd' has 0 simulated"),
        ("placements", [placed([0] * 5)], r"'t': placement has shape \(5,\), expected \(6,\)"),
        ("placements", [placed([0, 0, 2, 0, 0, 0])], "task 2 on device 2; devices are 0 to 1"),
        ("placements", [placed([0, 0, 0, -1, 0, 0])], "task 3 on device -1"),
        ("gantt", [ran([0, 2])], "'bad': task 1 is on device 2, of 2 devices"),
        ("gantt", [ran([0, -1])], "'bad': task 1 is on device -1"),
        ("gantt", [ran([0, 1], names="abc")], "3 names, 2 placements"),
        ("gantt", [ran([0, 1], [0, 2])], "task 1 runs from 2.0 to 1.0 s"),
        ("gantt", [ran([0, 1], [0, 0], [1, np.nan])], "task 1 runs from 0.0 to nan s"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_leaves_the_old_picture(
    tmp_path, kind, panels, message
):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=message):
        DRAW[kind](path, panels)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
