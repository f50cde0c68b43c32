"""The lock-step simulator equals the oracle; chunks and platforms give the same."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.graphs.padded import Sizes, bucket_size, pad_problem
from doppler_jax.simulator import lanes, simulate
from doppler_jax.simulator.batches import simulate_in_lockstep, simulate_padded
from doppler_jax.simulator.disciplines import QUEUES, find_discipline
from doppler_jax.simulator.lockstep import UNROLL, num_steps, run_lockstep
from doppler_jax.simulator.noise import Factors
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from tests.equations import equations
from tests.generators import (
    coarsen,
    random_factors,
    random_problem,
    topological_ranks,
    wide_problem,
)
from tests.simulator.cases import small_problem


@pytest.fixture(scope="module")
def case():
    """An padded, and 70 placements and priorities padded to it."""
    rng = np.random.default_rng(0)
    graph, costs = random_problem(rng, 20, 3)
    padded = pad_problem(graph, costs)
    columns = padded.padded_tasks + 1
    placements = rng.integers(0, 3, (70, columns)).astype(np.int32)
    return padded, placements, rng.random((70, columns)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("serial", [False, True])
def test_other_platforms_run_the_same(case, serial):
    padded, placements, rank = case
    assert num_steps(padded) % UNROLL != 0  # so the last iteration has steps to spare
    compute_s = jnp.asarray(padded.compute_s).at[7].set(jnp.inf)
    stuck = dataclasses.replace(padded, compute_s=compute_s)
    run = partial(
        run_lockstep, serial=serial, discipline=find_discipline("fifo"), schedule=True
    )
    on_cpu = jax.jit(partial(lanes.run_chunks, run, True))
    elsewhere = jax.jit(partial(lanes.run_chunks, run, False))
    for problem, ends in ((padded, True), (stuck, False)):
        expected_s, *expected = on_cpu((problem, None), placements, rank)
        assert np.isfinite(expected_s).all() == ends
        makespan_s, *times = elsewhere((problem, None), placements, rank)
        np.testing.assert_array_equal(makespan_s, expected_s)
        for found, wanted in zip(times, expected, strict=True):  # the last is of no task
            np.testing.assert_array_equal(found[:, :-1], wanted[:, :-1])


@pytest.mark.parametrize(("batch", "width"), [(1, 8), (24, 8), (25, 64), (70, 64), (300, 64)])
def test_batches_are_cut_as_suits_their_size(case, batch, width):
    _, placements, _ = case
    seen = []

    def run(shared, placement, rank, handling_s, *, native):
        if native:
            seen.append(placement.shape[0])
        return (placement.sum(1), placement[:, 1:] + shared)

    batch_placements = np.resize(placements, (batch, placements.shape[1]))
    arguments = (jnp.int32(3), batch_placements, None)
    total, shifted = jax.jit(partial(lanes.run_batch, run))(*arguments)
    np.testing.assert_array_equal(total, batch_placements.sum(1))
    np.testing.assert_array_equal(shifted, batch_placements[:, 1:] + 3)
    assert set(seen) == {width}


def test_the_whole_run_is_one_kernel_on_the_cpu(case):
    padded, placements, _ = case
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = simulate_padded.lower(padded, placements[:, :-1]).compile().as_text()
    assert 'xla_cpu_small_call="true"' in compiled
    assert "scatter" not in compiled


def test_loops_of_unknown_length_compile(case):
    # XLA aborted the process here while the kernel was given tables that it does not read.
    padded, placements, _ = case

    @jax.jit
    def repeatedly(padded, placements, times):
        def again(_, total):
            return total + simulate_padded(padded, placements).makespan_s

        return jax.lax.fori_loop(0, times, again, jnp.zeros(len(placements)))

    once = simulate_padded(padded, placements[:, :-1]).makespan_s
    np.testing.assert_array_equal(repeatedly(padded, placements[:, :-1], 2), once + once)


@pytest.mark.parametrize("width", [8, 100])
def test_a_jit_may_close_over_everything(width):
    # XLA aborted the process when a kernel got constants beside other operands.
    padded = pad_problem(*wide_problem(np.random.default_rng(0), width, 3, 2))
    placements = jnp.zeros((70, 3 * width), jnp.int32)
    expected = simulate_padded(padded, placements).makespan_s
    closed = jax.jit(lambda: simulate_padded(padded, placements).makespan_s)
    half = jax.jit(lambda p: simulate_padded(padded, p).makespan_s)
    np.testing.assert_array_equal(closed(), expected)
    np.testing.assert_array_equal(half(placements), expected)


def test_batched_calls_get_no_arrays_without_elements():
    # XLA aborted the process at such (jaxlib 0.11.2), where a batch is cut over devices.
    padded = pad_problem(*wide_problem(np.random.default_rng(0), 8, 3, 2))  # no inputs
    placements = np.zeros((70, padded.padded_tasks), np.int32)
    assert not all(np.size(leaf) for leaf in jax.tree.leaves(padded))
    made = equations(simulate_padded, padded, placements)
    calls = [
        e for e in made if e.primitive.name in ("custom_vmap_call", "optimization_barrier")
    ]
    assert len(calls) >= 2
    assert all(given.aval.size for call in calls for given in call.invars)


SIZES = Sizes(
    tasks=64, edges=4096, producers=128, readers=128, chains=64, devices=4, home_reads=16
)
"""All problems get one shape, so that they share compilations."""


def lockstep(graph, costs, placements, noise, dtype=np.float64, **options):
    """Starts and finishes `[B, N]` and makespans, padded to `SIZES`."""
    n, spare = graph.num_tasks, (0, SIZES.tasks - graph.num_tasks)
    ranks = options.pop("ranks")
    factors = None
    with jax.enable_x64(dtype == np.float64):
        padded = pad_problem(graph, costs, dtype, SIZES)
        if noise:
            most = {"compute": SIZES.tasks, "transfer": SIZES.edges, "inputs": 4}
            draw = zip(most.items(), noise.values(), strict=True)
            factors = Factors(
                **{
                    name: np.resize(array, (1, size, *array.shape[1:])).astype(dtype)
                    for (name, size), array in draw
                }
            )
        rank = None if ranks is None else np.pad(ranks, ((0, 0), spare)).astype(dtype)
        rows = np.pad(placements, ((0, 0), spare))
        result = simulate_padded(padded, rows, rank, factors, schedule=True, **options)
    result = jax.tree.map(lambda a: np.asarray(a if factors is None else a[0]), result)
    return result.start_s[:, :n], result.finish_s[:, :n], result.makespan_s


def assert_equals_oracle(graph, costs, placements, noise, dtype, rtol, **options):
    ranks = options["ranks"]
    starts, finishes, makespans = lockstep(graph, costs, placements, noise, dtype, **options)
    options = {"links": options["links"], "queue": options["queue"]}
    for b, placement in enumerate(placements):
        rank = None if ranks is None else ranks[b]
        schedule = simulate_oracle(graph, costs, placement, priority=rank, **options, **noise)
        np.testing.assert_allclose(starts[b], schedule.start_s, rtol=rtol)
        np.testing.assert_allclose(finishes[b], schedule.finish_s, rtol=rtol)
        np.testing.assert_allclose(makespans[b], makespan_s(schedule), rtol=rtol)


def ranks_for(rng, graph, queue):
    n = graph.num_tasks
    make = {
        "fifo": lambda: None,
        "priority": lambda: rng.integers(0, 12, (3, n)),  # ranks tie
        "in_order": lambda: np.array([topological_ranks(rng, graph) for _ in range(3)]),
        "random": lambda: np.array([rng.permutation(n) for _ in range(3)]),
    }
    return make[queue]()


NUM_TASKS = [0, 1, 2, 3, 5, 8, 16, 30, 64, 64, 64]


@pytest.mark.parametrize("links", ["parallel", "serial"])
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("kind", ["plain", "noise", "handling", "instants", "stuck"])
def test_equals_the_oracle_event_by_event(links, queue, kind):
    """Exactly where sums are; with noise to 1e-12, since XLA fuses products and sums."""
    rng = np.random.default_rng([links == "serial", QUEUES.index(queue), len(kind)])
    for num_tasks in NUM_TASKS:
        dyadic = kind != "noise"
        graph, costs = random_problem(rng, num_tasks, 4, dyadic=dyadic, makers=True)
        each_s, per_byte = rng.integers(0, 9, (2, 4)) / 4.0 * (kind == "handling")
        costs = costs.replace(handling_s=each_s, handling_s_per_byte=per_byte)
        if kind == "instants":  # costs of 0 and 1 alone: the order among devices counts
            graph, costs = coarsen(rng, graph, costs)
        if kind == "stuck":  # a task that cannot run, and what waits for it, never end
            unable = rng.random(costs.compute_s.shape) < 0.03
            costs = costs.replace(compute_s=np.where(unable, np.inf, costs.compute_s))
        noise = random_factors(rng, graph, 4) if kind == "noise" else {}
        placements = rng.integers(0, 4, (3, num_tasks))
        assert_equals_oracle(
            graph, costs, placements, noise, np.float64, 1e-12 if noise else 0,
            links=links, queue=queue, ranks=ranks_for(rng, graph, queue),
        )  # fmt: skip


@pytest.mark.parametrize("queue", ["fifo", "in_order"])
@pytest.mark.parametrize("dyadic", [True, False])
def test_float32_core_equals_the_oracle(dyadic, queue):
    rng = np.random.default_rng([9, dyadic])
    for num_tasks in NUM_TASKS:
        graph, costs = random_problem(rng, num_tasks, 4, dyadic=dyadic, makers=True)
        none = np.zeros(4)
        costs = costs.replace(handling_s=none, handling_s_per_byte=none)
        # With these costs no two events are so close that float32 swaps them.
        assert_equals_oracle(
            graph, costs, rng.integers(0, 4, (3, num_tasks)), {}, np.float32,
            0 if dyadic else 1e-5,
            links="parallel", queue=queue, ranks=ranks_for(rng, graph, queue),
        )  # fmt: skip


@pytest.mark.parametrize("queue", ["fifo", "in_order"])
def test_more_chains_than_a_chunk_has_lanes(queue):
    rng = np.random.default_rng(7)
    graph, costs = wide_problem(rng, 150, 2, 3)
    placements = rng.integers(0, 3, (70, 300)).astype(np.uint32)
    ranks = np.arange(300.0) if queue == "in_order" else None
    makespans, starts, _ = simulate_in_lockstep(
        graph, costs, placements, links="serial", queue=queue, ranks=ranks, schedule=True
    )
    for b in (0, 63, 64, 69):
        schedule = simulate_oracle(
            graph, costs, placements[b], links="serial", queue=queue, priority=ranks
        )
        np.testing.assert_array_equal(starts[b], schedule.start_s)
        assert makespans[b] == makespan_s(schedule)


def test_a_batch_may_mix_graphs_of_a_bucket():
    rng = np.random.default_rng(4)
    sizes = Sizes(32, 1024, 128, 128, 32, 3, 16)
    problem_list = [random_problem(rng, n, 3) for n in (20, 25, 30)]
    padded_list = [pad_problem(*problem, sizes=sizes) for problem in problem_list]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *padded_list)
    placements = rng.integers(0, 3, (3, 4, 32))
    mixed = jax.jit(jax.vmap(simulate_padded))(stacked, placements).makespan_s
    for i, padded in enumerate(padded_list):
        alone = simulate_padded(padded, placements[i]).makespan_s
        np.testing.assert_array_equal(mixed[i], alone)


@pytest.mark.parametrize("num_tasks", [1024, 16384])
def test_float32_is_exact_on_large_graphs_with_dyadic_costs(num_tasks):
    rng = np.random.default_rng(num_tasks)
    graph, costs = wide_problem(rng, 16, num_tasks // 16, 4)
    placement = rng.integers(0, 4, (1, num_tasks))
    found = simulate_padded(pad_problem(graph, costs), placement, schedule=True)
    schedule = simulate_oracle(graph, costs, placement[0])
    np.testing.assert_array_equal(found.finish_s[0, :num_tasks], schedule.finish_s)


def test_one_compilation_per_bucket():
    sizes = [22, 23, 24]  # and 21 to 23 edges
    assert {bucket_size(n) for n in range(21, 25)} == {24}
    rng = np.random.default_rng(0)
    run = jax.jit(chex.assert_max_traces(simulate_padded.__wrapped__, n=1))
    for n in sizes:
        graph, costs = small_problem(rng.random(n), [(v, 1, [v + 1]) for v in range(n - 1)], 2)
        makespans = run(pad_problem(graph, costs), np.zeros((4, 24), np.int32)).makespan_s
        np.testing.assert_allclose(makespans, costs.compute_s[:, 0].sum(), rtol=1e-6)


def test_duplex_links_are_refused(case):
    padded, placements, _ = case
    with pytest.raises(ValueError, match=r"links 'duplex' cannot be simulated inside jit"):
        simulate_padded(padded, placements[:, :-1], links="duplex")
    with pytest.raises(ValueError, match="needs ranks"):
        simulate_padded(padded, placements[:, :-1], queue="in_order")
    with pytest.raises(ValueError, match="unknown queue 'lifo'"):
        simulate_padded(padded, placements[:, :-1], queue="lifo")


def test_simulate_takes_the_lock_step_kernel_on_accelerators(monkeypatch):
    rng = np.random.default_rng(0)
    graph, costs = random_problem(rng, 20, 3)
    placements = rng.integers(0, 3, (5, 20))
    sizes = {"compute": (20,), "transfer": (graph.num_tensors, 3)}
    sizes["inputs"] = (graph.num_inputs, 3)
    factors = Factors(**{k: rng.lognormal(0, 0.3, (2, *size)) for k, size in sizes.items()})
    ranks = np.array([topological_ranks(rng, graph) for _ in range(5)])
    calls = [
        {},
        {"factors": factors},
        {"queue": "in_order", "priority": ranks},
        {"queue": "random", "priority": np.array([rng.permutation(20) for _ in range(2)])},
    ]
    native = [simulate.simulate(graph, costs, placements, **call) for call in calls]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(simulate, "simulate_native", None)  # is not called
    for call, expected in zip(calls, native, strict=True):
        found = simulate.simulate(graph, costs, placements, **call)
        for name in ("makespan_s", "start_s", "finish_s"):
            wanted = getattr(expected, name)
            assert getattr(found, name).shape == wanted.shape
            np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-12)
    with pytest.raises(ValueError, match="before task"):
        simulate.simulate(graph, costs, placements, queue="in_order", priority=-ranks)
