"""Arguments: residents stay where they are, others are moved in the call; outputs land."""

import dataclasses

import jax
import numpy as np
import pytest

from doppler_jax.engine import memory, ops
from doppler_jax.simulator.validate import validate
from doppler_jax.types import RESIDENT
from tests.kernels.conftest import all_modes, build, compile_on, random_program, run_plainly

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)


def at_home(sharded, homes):
    return dataclasses.replace(sharded, graph=sharded.graph.replace(input_home=np.array(homes)))


@all_modes
@pytest.mark.parametrize("homes", [(0, 0, RESIDENT), (1, 2, 0)])
def test_runs_programs_whose_inputs_are_moved(local, mode, homes):
    rng = np.random.default_rng(0)
    for seed in range(6):
        sharded = at_home(random_program(seed, 20), homes)
        step = compile_on(sharded, rng.integers(0, 4, 20), local, 4, mode=mode)
        for _ in range(2):
            out, expected = step(X), run_plainly(sharded, X)
            for name in ("in", "out"):
                np.testing.assert_allclose(out[name], expected[name], rtol=1e-5)
            validate(sharded.graph, step.trace, tolerance=0)
        moved = {~x for x in step.trace.transfer_tensor.tolist() if x < 0}
        assert moved <= {i for i, home in enumerate(homes) if home != RESIDENT}
        assert moved


@all_modes
def test_an_input_is_moved_once_for_all_its_readers(local, mode, monkeypatch):
    moved = []
    move = ops.transfer
    monkeypatch.setattr(ops, "transfer", lambda *a: moved.append(a[1].id) or move(*a))
    sharded = at_home(build([("mean", ["i0", "i2"])] * 3, ["t0", "t1", "t2"]), (0, 0, RESIDENT))
    step = compile_on(sharded, [0, 1, 1], local, mode=mode)
    step(X)
    assert moved == [1]
    assert step.trace.transfer_tensor.tolist() == [~0]
    assert step.trace.transfer_source.tolist() == [0]
    assert min(step.trace.start_s[1:]) >= step.trace.transfer_finish_s[0]


@all_modes
def test_a_failing_input_transfer_names_the_input(local, mode, monkeypatch):
    sharded = at_home(build([("mean", ["i0", "i2"])], ["t0"]), (0, 0, RESIDENT))
    step = compile_on(sharded, [1], local, mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "transfer", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match=r"^transfer of graph input 0, .*device 1") as e:
            step(X)
    assert (e.value.task, e.value.device) == (-1, 1)
    np.testing.assert_allclose(step(X)["out"], run_plainly(sharded, X)["out"])


def test_residents_stay_until_another_array_comes(local, monkeypatch):
    cuts = []
    cut = memory.slice_block
    monkeypatch.setattr(memory, "slice_block", lambda *a: cuts.append(a[1].start) or cut(*a))
    sharded = build([("mean", ["i0", "i1"]), ("mean", ["i1", "i2"])], ["t0", "t1"])
    sharded = at_home(sharded, (RESIDENT, 0, RESIDENT))
    step = compile_on(sharded, [0, 1], local)
    first, second = jax.numpy.asarray(X), jax.numpy.asarray(X + 1)
    step(first)
    assert sorted(cuts) == [(0,), (0,), (4,)]
    for array, expected in ((first, [(4,)]), (second, [(0,), (4,)]), (first, [(0,), (4,)])):
        cuts.clear()
        np.testing.assert_allclose(step(array)["out"], run_plainly(sharded, array)["out"])
        assert sorted(cuts) == expected  # input 1 is no resident, input 2 always the same


@all_modes
@pytest.mark.parametrize("out_device", [None, 0, 2])
def test_outputs_land_where_asked(local, mode, out_device):
    sharded = build([("mean", ["i0", "i1"]), ("mean", ["t0", "i2"])], ["t1", "t0"])
    step = compile_on(sharded, [2, 1], local, 3, mode=mode, out_device=out_device)
    out = step(X)
    np.testing.assert_allclose(out["out"], run_plainly(sharded, X)["out"], rtol=1e-5)
    where = jax.devices()[1 if out_device is None else out_device]
    assert out["out"].devices() == {where}  # by default that of its first block
