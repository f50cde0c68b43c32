import json

import chex
import jax
import numpy as np
import pytest

from doppler_jax.costs.build import reference_costs
from doppler_jax.graphs import padded as padded_module
from doppler_jax.graphs.build import make_graph
from doppler_jax.graphs.formats import load_graph
from doppler_jax.graphs.padded import bucket_size, pad_problem
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import simulate, simulate_padded
from doppler_jax.simulator.validate import validate
from doppler_jax.types import Costs
from tests.generators import random_problem

GOLDEN = [
    "chain_mm_112nodes",
    "ffnn_192nodes",
    "transformer_block_215nodes",
    "full_transformer_layer_261nodes",
    "8gpu_transformer_block",
]


def assert_equals_oracle(graph, costs, placements, *, rtol, priority=None):
    queue = "fifo" if priority is None else "priority"
    result = simulate(graph, costs, placements, queue=queue, priority=priority)
    for b, placement in enumerate(placements):
        schedule = simulate_oracle(graph, costs, placement, queue=queue, priority=priority)
        np.testing.assert_allclose(result.start_s[b], schedule.start_s, rtol=rtol)
        np.testing.assert_allclose(result.finish_s[b], schedule.finish_s, rtol=rtol)
        np.testing.assert_allclose(result.makespan_s[b], makespan_s(schedule), rtol=rtol)
        validate(graph, schedule, costs, queue=queue, priority=priority)


def one_bucket(monkeypatch, tasks, degree):
    """All problems get one shape and share a compilation; padding is tested beside."""
    sizes = {2: 512, 4: degree, 8: tasks, 16: 4096}
    monkeypatch.setattr(padded_module, "bucket_size", lambda size, smallest: sizes[smallest])


SIZES = [*range(13), 16, 20, 24, 32, *range(40, 65, 2), 64, 64, 64, 64, 64]


@pytest.mark.parametrize("num_devices", range(1, 9))
@pytest.mark.parametrize("dyadic", [True, False])
def test_equals_the_oracle_event_by_event(num_devices, dyadic, monkeypatch):
    one_bucket(monkeypatch, tasks=64, degree=128)
    assert 2 * 8 * len(SIZES) >= 500
    rng = np.random.default_rng([num_devices, dyadic])
    for num_tasks in SIZES:
        graph, costs = random_problem(rng, num_tasks, num_devices, dyadic=dyadic)
        placements = rng.integers(0, num_devices, (3, num_tasks))
        assert_equals_oracle(graph, costs, placements, rtol=0 if dyadic else 1e-12)


@pytest.mark.parametrize("dyadic", [True, False])
def test_float32_core_equals_the_oracle(dyadic, monkeypatch):
    one_bucket(monkeypatch, tasks=64, degree=128)
    rng = np.random.default_rng([9, dyadic])
    for num_tasks in SIZES:
        graph, costs = random_problem(rng, num_tasks, 3, dyadic=dyadic)
        placements = rng.integers(0, 3, (2, num_tasks))
        padded = np.pad(placements, ((0, 0), (0, 64 - num_tasks)))
        result = simulate_padded(pad_problem(graph, costs), padded, schedule=True)
        for b, placement in enumerate(placements):
            schedule = simulate_oracle(graph, costs, placement)
            # With these costs no two events are so close that float32 swaps them.
            rtol = 0 if dyadic else 1e-5
            starts = result.start_s[b, :num_tasks]
            np.testing.assert_allclose(starts, schedule.start_s, rtol=rtol)
            np.testing.assert_allclose(result.makespan_s[b], makespan_s(schedule), rtol=rtol)


@pytest.mark.parametrize("dyadic", [True, False])
def test_priority_queue_equals_the_oracle(dyadic, monkeypatch):
    one_bucket(monkeypatch, tasks=32, degree=64)
    rng = np.random.default_rng(7)
    for _ in range(10):
        graph, costs = random_problem(rng, 24, 3, dyadic=dyadic)
        placements = rng.integers(0, 3, (3, 24))
        priority = rng.integers(0, 12, 24)  # ranks tie; the smaller id goes first
        assert_equals_oracle(
            graph, costs, placements, rtol=0 if dyadic else 1e-12, priority=priority
        )


def test_start_order_as_priority_replays_the_fifo_schedule():
    rng = np.random.default_rng(3)
    graph, costs = random_problem(rng, 40, 4)
    placement = rng.integers(0, 4, 40)
    fifo = simulate_oracle(graph, costs, placement)
    rank = np.argsort(np.argsort(fifo.start_s, kind="stable"))
    replayed = simulate_oracle(graph, costs, placement, queue="priority", priority=rank)
    np.testing.assert_array_equal(replayed.start_s, fifo.start_s)


@pytest.mark.parametrize("name", GOLDEN)
def test_agrees_with_the_published_simulator(reference_graphs, name):
    golden = json.loads((reference_graphs / f"{name}.golden.json").read_text())
    graph = load_graph(reference_graphs / f"{name}.txt")
    d = golden["num_devices"]
    costs = Costs(
        compute_s=np.repeat(np.array(golden["compute_s"])[:, None], d, axis=1),
        tensor_bytes=np.array(golden["transfer_s"])[graph.tensor_producer],
        input_bytes=graph.input_bytes,
        latency_s=np.zeros((d, d)),
        seconds_per_byte=1.0 - np.eye(d),
        capacity_bytes=np.full(d, np.inf),
    )
    result = simulate(graph, costs, golden["placements"], schedule=False)
    np.testing.assert_allclose(result.makespan_s, golden["makespan_s"], rtol=1e-12)
    oracle = simulate_oracle(graph, costs, golden["placements"][0])
    np.testing.assert_allclose(makespan_s(oracle), golden["makespan_s"][0], rtol=1e-12)


def test_good_placements_have_their_published_makespans(reference_graphs):
    good = json.loads((reference_graphs / "good_placements.json").read_text())
    for name, entry in good.items():
        graph = load_graph(reference_graphs / f"{name}.txt")
        costs = reference_costs(graph, num_devices=entry["num_devices"])
        schedule = simulate_oracle(graph, costs, entry["placement"])
        np.testing.assert_allclose(makespan_s(schedule), entry["makespan"], rtol=1e-9)


def test_one_compilation_per_bucket():
    sizes = [22, 23, 24]  # and 21 to 23 edges
    assert {bucket_size(n) for n in range(21, 25)} == {24}
    rng = np.random.default_rng(0)
    run = jax.jit(chex.assert_max_traces(simulate_padded.__wrapped__, n=1))
    for n in sizes:
        graph = make_graph(
            flops=np.ones(n),
            tensor_producer=np.arange(n - 1),
            tensor_bytes=np.ones(n - 1),
            edge_tensor=np.arange(n - 1),
            edge_reader=np.arange(1, n),
        )
        costs = Costs(
            compute_s=rng.random((n, 2)),
            tensor_bytes=graph.tensor_bytes,
            input_bytes=graph.input_bytes,
            latency_s=np.zeros((2, 2)),
            seconds_per_byte=1.0 - np.eye(2),
            capacity_bytes=np.full(2, np.inf),
        )
        makespans = run(pad_problem(graph, costs), np.zeros((4, 24), np.int32)).makespan_s
        np.testing.assert_allclose(makespans, costs.compute_s[:, 0].sum(), rtol=1e-6)


def test_batch_order_and_chunks_do_not_matter():
    rng = np.random.default_rng(1)
    graph, costs = random_problem(rng, 24, 4)
    placements = rng.integers(0, 4, (300, 24))
    together = simulate(graph, costs, placements, schedule=False).makespan_s
    backwards = simulate(graph, costs, placements[::-1], schedule=False).makespan_s
    np.testing.assert_array_equal(together, np.asarray(backwards)[::-1])
    alone = simulate(graph, costs, placements[5], schedule=False).makespan_s
    np.testing.assert_array_equal(alone[0], together[5])


def test_relabelled_devices_and_scaled_costs():
    rng = np.random.default_rng(2)
    graph, costs = random_problem(rng, 24, 4, homes=False)
    placements = rng.integers(0, 4, (10, 24))
    plain = simulate(graph, costs, placements, schedule=False).makespan_s
    new = rng.permutation(4)  # device d becomes new[d]
    old = np.argsort(new)
    relabelled = costs.replace(
        compute_s=costs.compute_s[:, old],
        latency_s=costs.latency_s[old][:, old],
        seconds_per_byte=costs.seconds_per_byte[old][:, old],
    )
    moved = simulate(graph, relabelled, new[placements], schedule=False).makespan_s
    np.testing.assert_array_equal(moved, plain)
    doubled = costs.replace(
        compute_s=2 * costs.compute_s,
        latency_s=2 * costs.latency_s,
        seconds_per_byte=2 * costs.seconds_per_byte,
    )
    twice = simulate(graph, doubled, placements, schedule=False).makespan_s
    np.testing.assert_array_equal(twice, 2 * plain)


def test_a_task_that_cannot_run_on_its_device_never_finishes():
    graph = make_graph(
        flops=[1, 1, 1],
        tensor_producer=[0],
        tensor_bytes=[0],
        edge_tensor=[0],
        edge_reader=[1],
    )
    costs = Costs(
        compute_s=np.array([[1.0, np.inf], [1.0, 1.0], [1.0, 1.0]]),
        tensor_bytes=graph.tensor_bytes,
        input_bytes=graph.input_bytes,
        latency_s=np.zeros((2, 2)),
        seconds_per_byte=np.zeros((2, 2)),
        capacity_bytes=np.full(2, np.inf),
    )
    placements = np.array([[1, 0, 0], [0, 1, 1]])
    result = simulate(graph, costs, placements)
    np.testing.assert_array_equal(result.makespan_s, [np.inf, 2.0])
    np.testing.assert_array_equal(result.finish_s[0], [np.inf, np.inf, 1.0])
    oracle = simulate_oracle(graph, costs, placements[0])
    np.testing.assert_array_equal(result.start_s[0], oracle.start_s)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([[0, 0, 4]], "placement 0 puts task 2 on device 4; devices are 0 to 3"),
        ([[0, -1, 0]], "puts task 1 on device -1"),
        ([[0, 0]], r"expected \[B, 3\]"),
        ([[0.0, 1.0, 1.0]], "must hold integers"),
    ],
)
def test_bad_placements_are_refused(placements, message):
    graph, costs = random_problem(np.random.default_rng(0), 3, 4)
    with pytest.raises(ValueError, match=message):
        simulate(graph, costs, placements)


def test_bad_queues_are_refused():
    graph, costs = random_problem(np.random.default_rng(0), 3, 4)
    with pytest.raises(ValueError, match="unknown queue 'lifo'; known: fifo, priority"):
        simulate(graph, costs, [[0, 0, 0]], queue="lifo")
    with pytest.raises(ValueError, match="priority"):
        simulate(graph, costs, [[0, 0, 0]], queue="priority")
