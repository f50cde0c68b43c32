"""What shall run on a GPU runs on CPU devices, and says so where it does not run at all."""

import jax
import pytest

from experiments import gpu
from experiments.gpu import PARTS, GpuSettings


def run(tmp_path, *parts, platform="cpu"):
    gpu.main(GpuSettings(platform=platform, output=tmp_path / "results/gpu.md", parts=parts))


def page(tmp_path):
    return (tmp_path / "results/gpu.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_on_cpu_devices(part, tmp_path):
    run(tmp_path, part)
    text = page(tmp_path)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert f"## {PARTS[part].title}\n" in text
    assert len(rows) > 2
    for wrong in ("FAILED", "DIFFERENT", "not finished", " failed"):
        assert wrong not in text
    if part == "engine":
        assert text.count("equal (") == text.count("valid, ") == 2 * (2 * 3 + 1)
    if part == "versions":
        assert f"| jax | {jax.__version__} |" in text


def test_a_part_out_of_time_is_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WHOLE_S", 0.0)
    with pytest.raises(SystemExit, match="failed or ran out of time: versions, moving"):
        run(tmp_path, "versions", "moving")
    text = page(tmp_path)
    assert "| versions: not finished | out of time after 1 s |\n" in text
    assert "| moving: not finished | out of time after 1 s |  |\n" in text


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_a_part_that_fails_is_a_row_that_says_so(tmp_path):
    with pytest.raises(SystemExit, match="failed or ran out of time: versions"):
        run(tmp_path, "versions", platform="gpu")
    assert "| versions: not finished | exit status 1: " in page(tmp_path)


def test_unknown_parts_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="--parts: unknown 'x'; known: versions, engine, "):
        run(tmp_path, "versions", "x")
    assert not (tmp_path / "results").exists()
