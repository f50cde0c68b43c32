import matplotlib.image
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.reports.gantt import PALETTE
from doppler_jax.reports.placements import lay_out, plot_placements
from tests.reports.test_gantt import share_of

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


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ([0] * 5, r"'t': placement has shape \(5,\); expected \(6,\)"),
        ([0, 0, 2, 0, 0, 0], "task 2 is on device 2, of 2 devices"),
        ([0, 0, 0, -1, 0, 0], "task 3 is on device -1"),
    ],
)
def test_bad_placements_are_refused(tmp_path, graph, placement, message):
    with pytest.raises(ValueError, match=message):
        plot_placements(tmp_path / "a.png", [("t", graph, placement)], num_devices=2)
    with pytest.raises(ValueError, match="panels is empty"):
        plot_placements(tmp_path / "a.png", [], num_devices=2)
    assert not list(tmp_path.iterdir())
