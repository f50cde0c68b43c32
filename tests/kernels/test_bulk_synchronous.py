import numpy as np
import pytest

from doppler_jax.simulator.synchronous import hop_levels
from doppler_jax.types import RESIDENT
from tests.kernels.conftest import build, compile_on, delay, random_program
from tests.kernels.test_inputs import at_home

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)


@pytest.mark.parametrize("homes", [(RESIDENT,) * 3, (0, 1, 2)])
def test_barriers_part_levels_from_transfers(local, homes):
    rng = np.random.default_rng(1)
    for seed in range(8):
        sharded = at_home(random_program(seed, 24), homes)
        placement = rng.integers(0, 3, 24)
        step = compile_on(sharded, placement, local, 3, mode="bulk_synchronous")
        step(X)
        trace, level = step.trace, hop_levels(sharded.graph)
        is_input = trace.transfer_tensor < 0
        producer = sharded.graph.tensor_producer[np.where(is_input, 0, trace.transfer_tensor)]
        sent_after = np.where(is_input, -1, level[producer])
        for k in range(-1, level.max() + 1):
            sent = sent_after == k
            before = trace.finish_s[level <= k].max(initial=0.0)
            arrived = trace.transfer_finish_s[sent].max(initial=before)
            assert (trace.transfer_start_s[sent] >= before).all()
            assert (trace.start_s[level > k] >= arrived).all()


def test_a_level_waits_for_its_slowest_task(local):
    sharded = build([("make", []), ("make", []), ("mean", ["t1", "i0"])], ["t0", "t2"])
    step = compile_on(sharded, [0, 1, 1], local, mode="bulk_synchronous")
    delay(step, 0, 0.2)
    step(X)
    assert step.trace.start_s[2] >= step.trace.finish_s[0] > 0.2
