"""What shall run on a GPU runs on CPU devices, and says so where it does not run at all."""

import dataclasses

import jax
import pytest

from experiments import gpu
from experiments.gpu import PARTS, STUDY
from tests.experiments.test_studies import DEVICES


def run(tmp_path, *parts, platform="cpu"):
    changes = {"platform": platform, "parts": parts, "runs": tmp_path, "publish": False}
    gpu.main(dataclasses.replace(STUDY.settings, host_devices=DEVICES, **changes))


def page(tmp_path):
    return (tmp_path / "gpu" / "gpu.md").read_text()


@pytest.fixture(autouse=True)
def _environment_is_kept(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_on_cpu_devices(part, tmp_path):
    run(tmp_path, part)
    text = page(tmp_path)
    assert f"## {PARTS[part].title}\n" in text
    assert (f"## {PARTS[part].title}, the host's cores alone\n" in text) == PARTS[
        part
    ].also_host
    for wrong in (*gpu.WRONG, " failed"):
        assert wrong not in text
    if part == "engine":
        assert text.count("equal (") == text.count("valid, ") == 2 * (2 * 3 + 1)
    elif part == "tests":
        assert " passed" in text
    else:
        assert text.count("\n| ---") >= 2
    assert f"jax {jax.__version__}" in text


def test_a_part_out_of_time_is_said_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WHOLE_S", 0.0)
    with pytest.raises(SystemExit, match="failed or ran out of time"):
        run(tmp_path, "tests", "moving")
    assert page(tmp_path).count("NOT FINISHED: out of time after 1 s\n") == 2


def test_a_part_that_fails_is_said_on_the_page_and_the_others_are_run(tmp_path, monkeypatch):
    broken = dataclasses.replace(PARTS["tests"], tiny="tests/none.py -n 0")
    monkeypatch.setitem(gpu.PARTS, "tests", broken)
    no_study = dataclasses.replace(PARTS["moving"], command="experiments.none")
    monkeypatch.setitem(gpu.PARTS, "moving", no_study)
    with pytest.raises(SystemExit, match="failed or ran out of time"):
        run(tmp_path, "moving", "tests")
    first, second = page(tmp_path).split("NOT FINISHED: ")[1:]
    assert first.startswith("exit status 1: ")
    assert "No module named experiments.none" in first
    assert second.startswith("exit status 4: ")
    assert "file or directory not found: tests/none.py" in second


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_nothing_is_run(tmp_path):
    with pytest.raises(ValueError, match=r"no GPU, JAX has .*--platform cpu does without"):
        run(tmp_path, "moving", platform="gpu")
    assert not list(tmp_path.rglob("*.md"))


def test_unknown_parts_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="--parts: unknown 'x'; known: engine, "):
        run(tmp_path, "tests", "x")
    assert not list(tmp_path.rglob("*.md"))
