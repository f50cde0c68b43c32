"""Pictures of simulated against measured makespans."""

import numpy as np
import pytest

from doppler_jax.reports.scatter import Panel, plot_scatter


def test_a_picture_of_several_panels_is_written(tmp_path):
    points = np.array([1e-3, 2e-3, 4e-3])
    sizes = []
    for count in (1, 4):
        path = tmp_path / f"{count}.png"
        plot_scatter(path, [Panel(f"panel {k}", points, 1.1 * points) for k in range(count)])
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(picture[16:20]))  # width in pixels
    assert sizes[1] > 2 * sizes[0]
    assert {path.name for path in tmp_path.iterdir()} == {"1.png", "4.png"}


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ([], "panels is empty"),
        ([Panel("odd", np.ones(2), np.ones(3))], "'odd' has 2 simulated and 3 measured"),
        ([Panel("bare", np.ones(0), np.ones(0))], "'bare' has 0 simulated"),
    ],
)
def test_nothing_to_draw_is_refused(tmp_path, panels, message):
    with pytest.raises(ValueError, match=message):
        plot_scatter(tmp_path / "no.png", panels)
    assert not list(tmp_path.iterdir())
