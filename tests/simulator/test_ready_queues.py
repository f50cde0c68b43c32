import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.graphs import padded as padded_module
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.simulator import queue_heaps, queue_trees
from doppler_jax.simulator.handling import handling_seconds
from doppler_jax.simulator.lockstep import run_batch
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.queue_heaps import make_heaps
from doppler_jax.simulator.queue_trees import make_trees, queue_order
from doppler_jax.simulator.ready_queues import run_ready_queues
from tests.generators import random_problem, wide_problem


@pytest.fixture(autouse=True)
def one_bucket(monkeypatch):
    """All problems get one shape, so that they share compilations."""
    sizes = {2: 16, 4: 128, 8: 64, 16: 4096}
    monkeypatch.setattr(padded_module, "bucket_size", lambda size, smallest: sizes[smallest])


@partial(jax.jit, static_argnames=("serial", "native"))
def run(padded, placements, rank=None, factor=None, *, serial=False, native=True):
    spare = ((0, 0), (0, padded.padded_tasks + 1 - placements.shape[1]))
    placements = jnp.pad(jnp.asarray(placements, jnp.int32), spare)
    order = None if rank is None else queue_order(jnp.pad(rank, spare))
    handling_s = handling_seconds(padded, placements)
    kernel = partial(run_ready_queues, serial=serial, schedule=True)
    if not native:
        return kernel((padded, factor), placements, order, handling_s, native=False)
    return run_batch(kernel, (padded, factor), placements, order, handling_s)


def assert_equals_oracle(problem, placements, dtype, rtol, *, serial, ranks, noise=None):
    """`noise` is the factors of tasks `[N]` and of transfers `[T, D]`."""
    graph, costs = problem
    options = {"links": "serial" if serial else "parallel"}
    with jax.enable_x64(dtype == np.float64):
        padded = pad_problem(graph, costs, dtype)
        if jax.default_backend() == "cpu":  # others have no queues, see `run_ready_queues`
            no_chains = {name: 0 * getattr(padded, name) for name in ("chain", "chain_head")}
            padded = dataclasses.replace(padded, **no_chains)
        factor = None
        if noise is not None:
            options |= {"compute_factor": noise[0], "transfer_factor": noise[1]}
            spare = (0, padded.padded_tasks + 1 - graph.num_tasks)
            tasks = np.pad(noise[0], spare)[:, None].astype(dtype)
            padded = dataclasses.replace(padded, compute_s=padded.compute_s * tasks)
            most = 4096 - graph.num_tensors  # one shape
            factor = np.pad(noise[1], ((0, most), (0, 0))).astype(dtype)
        rows = np.pad(placements, ((0, 0), (0, 64 - graph.num_tasks)))
        rank = None if ranks is None else np.pad(ranks, ((0, 0), (0, 64 - graph.num_tasks)))
        makespans, starts, finishes = map(
            np.asarray, run(padded, rows, rank, factor, serial=serial)
        )
    for b, placement in enumerate(placements):
        if ranks is not None:
            options |= {"queue": "priority", "priority": ranks[b]}
        schedule = simulate_oracle(graph, costs, placement, **options)
        n = graph.num_tasks
        np.testing.assert_allclose(starts[b, :n], schedule.start_s, rtol=rtol)
        np.testing.assert_allclose(finishes[b, :n], schedule.finish_s, rtol=rtol)
        np.testing.assert_allclose(makespans[b], makespan_s(schedule), rtol=rtol)


SIZES = [0, 1, 2, 3, 5, 8, 16, 30, *[64] * 6]


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("queue", ["fifo", "priority"])
@pytest.mark.parametrize("noisy", [False, True])
def test_equals_the_oracle_event_by_event(serial, queue, noisy):
    rng = np.random.default_rng([serial, queue == "fifo", noisy])
    for num_tasks in SIZES:
        for dyadic in [True, False] if not noisy else [False]:
            problem = random_problem(rng, num_tasks, 4, dyadic=dyadic)
            ranks = rng.integers(0, 12, (3, num_tasks)).astype(float)  # ranks tie
            noise = None
            if noisy:
                tensors = (problem[0].num_tensors, 4)
                noise = rng.lognormal(0, 0.3, num_tasks), rng.lognormal(0, 0.3, tensors)
            assert_equals_oracle(
                problem,
                rng.integers(0, 4, (3, num_tasks)),
                np.float64,
                0 if dyadic else 1e-12,
                serial=serial,
                ranks=ranks if queue == "priority" else None,
                noise=noise,
            )


@pytest.mark.parametrize("queue", ["fifo", "priority"])
def test_devices_may_spend_time_on_transfers(queue):
    rng = np.random.default_rng(3)
    for num_tasks in SIZES:
        graph, costs = random_problem(rng, num_tasks, 4, dyadic=True)
        each_s, per_byte = rng.integers(0, 9, (2, 4)) / 4.0
        assert_equals_oracle(
            (graph, costs.replace(handling_s=each_s, handling_s_per_byte=per_byte)),
            rng.integers(0, 4, (3, num_tasks)),
            np.float64,
            0,
            serial=True,
            ranks=rng.permuted(np.arange(3.0 * num_tasks).reshape(3, -1), axis=1)
            if queue == "priority"
            else None,
        )


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize(("serial", "queue"), [(False, "fifo"), (True, "priority")])
def test_float32_is_exact_on_dyadic_costs(num_devices, serial, queue):
    rng = np.random.default_rng([num_devices, serial])
    for num_tasks in SIZES:
        ranks = rng.integers(0, 12, (3, num_tasks)).astype(np.float32)
        assert_equals_oracle(
            random_problem(rng, num_tasks, num_devices, dyadic=True),
            rng.integers(0, num_devices, (3, num_tasks)),
            np.float32,
            0,
            serial=serial,
            ranks=ranks if queue == "priority" else None,
        )


@pytest.mark.parametrize("queue", ["fifo", "priority"])
def test_everything_at_one_instant(queue):
    """Costs of 0 and 1 alone: the order among devices decides what happens."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        graph, costs = random_problem(rng, 40, 4, homes=False)
        costs = costs.replace(
            compute_s=rng.integers(0, 2, (40, 4)) * 1.0,
            tensor_bytes=rng.integers(0, 2, graph.num_tensors) * 1.0,
            latency_s=np.zeros((4, 4)),
            seconds_per_byte=1.0 - np.eye(4),
        )
        ranks = rng.integers(0, 9, (3, 40)).astype(float) if queue == "priority" else None
        placements = rng.integers(0, 4, (3, 40))
        assert_equals_oracle(
            (graph, costs), placements, np.float64, 0, serial=False, ranks=ranks
        )


@pytest.mark.parametrize("queue", ["fifo", "priority"])
def test_tasks_that_cannot_run_never_finish(queue):
    rng = np.random.default_rng(6)
    for _ in range(10):
        graph, costs = random_problem(rng, 40, 4, dyadic=True)
        compute_s = np.where(rng.random((40, 4)) < 0.03, np.inf, costs.compute_s)
        ranks = rng.integers(0, 9, (3, 40)).astype(float) if queue == "priority" else None
        placements = rng.integers(0, 4, (3, 40))
        problem = graph, costs.replace(compute_s=compute_s)
        assert_equals_oracle(problem, placements, np.float64, 0, serial=False, ranks=ranks)


@pytest.mark.slow
def test_many_placements_of_a_wide_graph(monkeypatch):
    monkeypatch.undo()  # true sizes
    rng = np.random.default_rng(7)
    graph, costs = wide_problem(rng, 150, 3, 3)
    n, d = graph.num_tasks, costs.num_devices
    placements = rng.integers(0, d, (70, n))  # more than one chunk of lanes
    padded = pad_problem(graph, costs)
    results = chex.assert_max_traces(run.__wrapped__, n=1)(padded, placements)
    for b in [0, 1, 33, 69]:
        oracle = simulate_oracle(graph, costs, placements[b])
        np.testing.assert_array_equal(results[1][b, :n], oracle.start_s)


def test_other_platforms_get_the_same_schedules():
    rng = np.random.default_rng(8)
    graph, costs = random_problem(rng, 64, 3, dyadic=True)
    placements, ranks = rng.integers(0, 3, (5, 64)), rng.integers(0, 9, (5, 64))
    padded = pad_problem(graph, costs)
    makespans, starts, finishes = run(padded, placements, ranks)
    elsewhere = run(padded, placements, ranks, native=False)
    n = graph.num_tasks  # what is behind it is of no task
    found = elsewhere[0], elsewhere[1][:, :n], elsewhere[2][:, :n]
    chex.assert_trees_all_equal(found, (makespans, starts[:, :n], finishes[:, :n]))


def test_queue_order_sorts_by_rank_then_id():
    rank = jnp.array([[3, 1, 3, 1, 0], [0, 0, 0, 0, 0]])  # the last task never runs
    expected = [[1, 3, 0, 2, 4], [0, 1, 2, 3, 4]]
    np.testing.assert_array_equal(queue_order(rank), expected)


def test_trees_give_the_first_that_is_due():
    same = partial(jnp.multiply, jnp.float32(1))
    put = jax.jit(partial(queue_trees.put, hold=same))
    take_first = jax.jit(partial(queue_trees.take_first, hold=same))
    ready_s = np.array([5.0, 2.0, 9.0, 2.0, 4.0, 1.0, 3.0, 7.0, 6.0], np.float32)
    device_at = np.array([0, 0, 0, 0, 0, 1, 0, 0, 0] + 7 * [0], np.float32)
    trees = make_trees(1, 2, 9, jnp.dtype("float32"))
    for position, t in enumerate(ready_s):
        device = jnp.asarray(device_at[position : position + 1])
        trees = put(trees, device, jnp.array([position], jnp.float32), jnp.array([t]))
    found = []
    for _ in range(9):
        s, position, trees = take_first(
            trees, jnp.array([0]), jnp.asarray(device_at), free_s=jnp.array([4.0])
        )
        found.append((int(position[0]), float(s[0])))
    # Free at 4, the device takes what is ready in the order of positions, then the next ready.
    order = [1, 3, 4, 6, 0, 8, 7, 2]
    assert found[:-1] == [(p, float(ready_s[p])) for p in order]
    assert found[-1][1] == np.inf
    assert float(trees[0][5]) == 1.0  # of the other device


def test_heaps_give_the_first_entry_of_each_lane():
    """Any series of puts and takes, on 8 lanes that differ, against lists."""
    rng = np.random.default_rng(9)
    lanes, devices, most = 8, 3, 20
    same = partial(jnp.multiply, jnp.float32(1))
    put = jax.jit(partial(queue_heaps.put, hold=same))
    take_first = jax.jit(partial(queue_heaps.take_first, hold=same))
    heaps = make_heaps(lanes, devices, most, jnp.dtype("float32"))
    expected = [[[] for _ in range(devices)] for _ in range(lanes)]
    taken = 0
    for step in range(400):
        device = rng.integers(0, devices, lanes)
        if rng.random() < (0.6 if step // 100 % 2 == 0 else 0.3):  # they fill and empty
            ready_s = rng.integers(0, 9, lanes).astype(np.float32)  # ready times tie
            for lane, d in enumerate(device):
                if len(expected[lane][d]) == most or rng.random() < 0.2:
                    ready_s[lane] = np.inf
                else:
                    expected[lane][d].append((float(ready_s[lane]), step))
            task = jnp.full(lanes, step, jnp.float32)
            heaps = put(heaps, device.astype(np.float32), task, ready_s)
        else:
            ready_s, task, heaps = take_first(heaps, device)
            for lane, d in enumerate(device):
                first = min(expected[lane][d], default=(np.inf, np.inf))
                assert (float(ready_s[lane]), float(task[lane])) == first
                if expected[lane][d]:
                    expected[lane][d].remove(first)
                    taken += 1
        sizes = [[len(queue) for queue in lane] for lane in expected]
        np.testing.assert_array_equal(heaps.size.T, sizes)
    assert taken > 400
