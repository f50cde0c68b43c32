import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.handling import task_handling_s
from doppler_jax.costs.observed import refit_costs
from tests.generators import free_costs

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
PROGRAM = dj.trace(lambda a, b, c: jnp.tanh(a @ b) @ c, SQUARE, SQUARE, SQUARE)
SHARDED = dj.partition(PROGRAM, num_shards=2, strategy="uniform")
GRAPH = SHARDED.graph
N = GRAPH.num_tasks
FLAT = 1 - np.eye(3)
TRUE = free_costs(
    GRAPH, np.full((N, 3), [2.0, 3.0, 4.0]), latency_s=0.5 * FLAT, seconds_per_byte=1e-3 * FLAT
)


def run(placement, costs=TRUE):
    return dj.simulate_oracle(GRAPH, costs, np.asarray(placement), links="serial")


def falsified(compute=1.0, latency=1.0, per_byte=1.0):
    factors = {"compute_s": compute, "latency_s": latency, "seconds_per_byte": per_byte}
    return TRUE.replace(**{name: TRUE[name] * factor for name, factor in factors.items()})


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_false_costs_of_handling_are_put_right(factor):
    """The engine's traces have it between tasks, the simulator's in them."""
    true = TRUE.replace(handling_s=np.array([0.3, 0.2, 0.1]), handling_s_per_byte=np.zeros(3))
    rng = np.random.default_rng(0)
    traces = []
    for _ in range(12):
        placement = rng.integers(0, 3, N)
        trace = run(placement, true)
        delay_s = task_handling_s(GRAPH, true, placement)
        traces.append(dataclasses.replace(trace, start_s=trace.start_s + delay_s))
    believed = true.replace(handling_s=true.handling_s * factor)
    found = refit_costs(SHARDED, believed, traces)
    largest = GRAPH.tensor_bytes.max()
    spent_s = found.handling_s + largest * found.handling_s_per_byte
    np.testing.assert_allclose(spent_s, true.handling_s, rtol=0.05)
    np.testing.assert_allclose(found.compute_s, true.compute_s, rtol=0.1)
    few = refit_costs(SHARDED, believed, traces[:3])
    np.testing.assert_array_equal(few.handling_s, believed.handling_s)
    assert refit_costs(SHARDED, TRUE, traces).handling_s is None


def test_none_and_exact_executions_change_nothing():
    assert refit_costs(SHARDED, TRUE, []) is TRUE
    found = refit_costs(SHARDED, TRUE, [run(np.arange(N) % 3)])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(TRUE), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_false_costs_of_transfers_are_put_right(factor):
    """Links that carried nothing are taken to be as false as those that did."""
    believed = falsified(latency=factor, per_byte=factor)
    trace = run(np.arange(N) % 2)
    links = np.stack([trace.transfer_source, trace.transfer_destination], axis=1).tolist()
    assert set(map(tuple, links)) == {(0, 1), (1, 0)}
    found = refit_costs(SHARDED, believed, [trace])
    for size in np.unique(GRAPH.tensor_bytes):
        found_s, true_s = (c.latency_s + size * c.seconds_per_byte for c in (found, TRUE))
        np.testing.assert_allclose(found_s, true_s, rtol=1e-6)


def test_false_costs_of_tasks_are_put_right():
    """Every kernel runs on device 0; a device that ran nothing is scaled as that one."""
    believed = falsified(compute=np.array([3.0, 5.0, 3.0]))
    found = refit_costs(SHARDED, believed, [run(np.zeros(N, int))])
    np.testing.assert_allclose(found.compute_s[:, [0, 2]], TRUE.compute_s[:, [0, 2]], rtol=1e-6)
    np.testing.assert_allclose(found.compute_s[:, 1], TRUE.compute_s[:, 1] * 5 / 3, rtol=1e-6)
    np.testing.assert_array_equal(found.latency_s, TRUE.latency_s)


def test_an_outlier_among_executions_does_not_count():
    slow = falsified(compute=50.0)
    traces = [run(np.zeros(N, int), costs) for costs in (TRUE, slow, TRUE)]
    found = refit_costs(SHARDED, TRUE, traces)
    np.testing.assert_allclose(found.compute_s, TRUE.compute_s, rtol=1e-6)


def test_where_a_task_cannot_run_stays_so():
    forbidden = TRUE.compute_s.copy()
    forbidden[0, 1] = np.inf
    believed = dataclasses.replace(TRUE, compute_s=forbidden)
    found = refit_costs(SHARDED, believed, [run(np.zeros(N, int))])
    assert np.isinf(found.compute_s[0, 1])
    assert np.isfinite(found.compute_s).sum() == 3 * N - 1


def test_links_believed_free_get_what_was_seen():
    free = falsified(latency=0.0, per_byte=0.0)
    found = refit_costs(SHARDED, free, [run(np.arange(N) % 2)])
    size = GRAPH.tensor_bytes.max()
    assert found.latency_s[0, 1] + size * found.seconds_per_byte[0, 1] > 0.5
