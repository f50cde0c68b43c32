import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from doppler_jax.reports.gantt import draw_gantt, op_type, plot_gantt
from doppler_jax.reports.pictures import OTHER, PALETTE
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


@pytest.mark.parametrize(
    ("times", "names", "message"),
    [
        (([0, 2], [0, 0], [1, 1]), "ab", "'bad': task 1 is on device 2, of 2 devices"),
        (([0, -1], [0, 0], [1, 1]), "ab", "'bad': task 1 is on device -1"),
        (([0, 1], [0, 0], [1, 1]), "abc", "3 names, 2 placements"),
        (([0, 1], [0, 2], [1, 1]), "ab", "task 1 runs from 2.0 to 1.0 s"),
        (([0, 1], [0, 0], [1, np.nan]), "ab", "task 1 runs from 0.0 to nan s"),
    ],
)
def test_bad_schedule_leaves_the_old_picture(tmp_path, times, names, message):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=message):
        plot_gantt(path, [("bad", make_schedule(*times), list(names))], num_devices=2)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
