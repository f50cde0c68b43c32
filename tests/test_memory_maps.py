import pathlib

import jax
import numpy as np
import pytest

from doppler_jax import memory_maps
from doppler_jax.memory_maps import free_memory_maps
from doppler_jax.placing import place
from tests.generators import random_problem


@pytest.fixture
def traces():
    """A jitted function's traces so far, one of them of the call that this makes."""
    counted = []

    @jax.jit
    def function(x):
        counted.append(x)
        return x + 1

    function(1)
    return lambda: function(1) and len(counted)


def pretend(monkeypatch, tmp_path, *, bound, maps):
    for name, text in (("_BOUND", f"{bound}\n"), ("_MAPS", "7f00 r-xp\n" * maps)):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(memory_maps, name, str(tmp_path / name))


@pytest.mark.parametrize(("maps", "expected"), [(500, 1), (501, 2)])
def test_compiled_programs_are_dropped_near_the_bound(
    monkeypatch, tmp_path, traces, maps, expected
):
    pretend(monkeypatch, tmp_path, bound=1000, maps=maps)
    free_memory_maps()
    assert traces() == expected


def test_placing_sees_to_it(monkeypatch, tmp_path, traces):
    pretend(monkeypatch, tmp_path, bound=1000, maps=900)
    place(*random_problem(np.random.default_rng(0), 6, 2), method="heft")
    assert traces() == 2


def test_where_the_system_tells_no_bound_nothing_happens(monkeypatch, tmp_path, traces):
    monkeypatch.setattr(memory_maps, "_BOUND", str(tmp_path / "none"))
    free_memory_maps()
    assert traces() == 1


@pytest.mark.parametrize(("share", "expected"), [(1e-6, 2), (1.0, 1)])
def test_this_system_can_be_asked(monkeypatch, traces, share, expected):
    if not pathlib.Path(memory_maps._BOUND).exists():
        pytest.skip("not Linux")
    monkeypatch.setattr(memory_maps, "SHARE", share)
    free_memory_maps()
    assert traces() == expected
