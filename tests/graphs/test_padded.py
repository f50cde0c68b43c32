import itertools

import numpy as np
import pytest

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.chains import chain_cover
from doppler_jax.graphs.padded import bucket_size, input_ready_s, pad_problem
from doppler_jax.types import RESIDENT
from tests.generators import free_costs, random_problem, small_graph

SIZES = [0, 1, 2, 8, 33, 64]


def problem(num_tasks):
    return random_problem(np.random.default_rng(num_tasks), num_tasks, 3)


@pytest.mark.parametrize("num_tasks", SIZES)
def test_tables_list_the_edges_of_every_task(num_tasks):
    graph, costs = problem(num_tasks)
    padded = pad_problem(graph, costs)
    nobody = padded.padded_tasks
    assert nobody == bucket_size(num_tasks, smallest=8)
    ends = np.stack(task_edges(graph), axis=1).tolist()
    sizes = costs.tensor_bytes[graph.edge_tensor].astype(np.float32).tolist()
    for own, tasks, num_bytes in [
        (1, padded.pred_task, padded.pred_bytes),
        (0, padded.succ_task, padded.succ_bytes),
    ]:
        count = [sum(edge[own] == v for edge in ends) for v in range(num_tasks)]
        assert tasks.shape == num_bytes.shape
        assert tasks.shape == (nobody + 1, bucket_size(max(count, default=0), smallest=4))
        for v in range(nobody + 1):
            edges = zip(ends, sizes, strict=True)
            expected = [(edge[1 - own], size) for edge, size in edges if edge[own] == v]
            expected += [(nobody, 0.0)] * (tasks.shape[1] - len(expected))
            assert list(zip(tasks[v].tolist(), num_bytes[v].tolist(), strict=True)) == expected


@pytest.mark.parametrize("num_tasks", SIZES)
def test_costs_are_padded_with_zeros(num_tasks):
    graph, costs = problem(num_tasks)
    padded = pad_problem(graph, costs)
    assert padded.num_tasks == num_tasks
    for found, expected in [
        (padded.compute_s, costs.compute_s),
        (padded.input_ready_s, input_ready_s(graph, costs)),
    ]:
        assert found.shape == (padded.padded_tasks + 1, 3)
        np.testing.assert_array_equal(found[:num_tasks], expected.astype(np.float32))
        assert (found[num_tasks:] == 0).all()
    for name in ("latency_s", "seconds_per_byte"):
        np.testing.assert_array_equal(
            getattr(padded, name), getattr(costs, name).astype(np.float32), name
        )


@pytest.mark.parametrize("num_tasks", SIZES)
def test_chains_are_linked(num_tasks):
    graph, costs = problem(num_tasks)
    padded = pad_problem(graph, costs)
    cover, nobody = chain_cover(graph), padded.padded_tasks
    assert len(padded.chain_head) == bucket_size(len(cover), smallest=8)
    walked = []
    for head in padded.chain_head.tolist():
        chain = []
        while head != nobody:
            chain.append(head)
            head = int(padded.chain_next[head])
        walked.append(chain)
    assert walked[: len(cover)] == cover
    assert not any(walked[len(cover) :])
    assert (padded.chain_next[num_tasks:] == nobody).all()


def test_graph_inputs_travel_from_their_homes():
    # Inputs 0 and 1 lie on devices 0 and 1, input 2 is resident; task 0 reads all three.
    graph = small_graph([1] * 3, [], [(0, 2, [0]), (1, 3, [0, 1]), (RESIDENT, 100, [0, 2])])
    links = np.array([[0.0, 1.0], [2.0, 0.0]])
    costs = free_costs(graph, np.ones((3, 2)), latency_s=links, seconds_per_byte=10 * links)
    assert input_ready_s(graph, costs).tolist() == [[62.0, 21.0], [62.0, 0.0], [0.0, 0.0]]


def test_graphs_of_a_bucket_have_one_shape():
    shapes = []
    for num_tasks, _ in itertools.product([58, 60, 64], range(2)):
        edges = [(v, v + 1, 1.0) for v in range(num_tasks - 1)]
        padded = pad_problem(*from_edge_delays(np.ones(num_tasks), edges, num_devices=2))
        shapes.append({name: np.shape(array) for name, array in vars(padded).items()})
    assert all(shape == shapes[0] for shape in shapes)


def test_buckets_hold_their_sizes_and_waste_at_most_a_quarter():
    twice_or_more = [10, 10, 12, 12, 14, 14, 16, 16, 20, 20, 20, 20]
    assert [bucket_size(n) for n in range(1, 21)] == [*range(1, 9), *twice_or_more]
    larger = {21: 24, 25: 28, 29: 32, 33: 40, 41: 48, 229: 256, 4097: 5120}
    assert {n: bucket_size(n) for n in larger} == larger
    assert bucket_size(0) == 1  # nothing takes the smallest
    assert bucket_size(0, smallest=8) == 8
    assert bucket_size(3, smallest=9) == 10
    assert bucket_size(11, smallest=8) == 12
    buckets = [bucket_size(n) for n in range(1, 5000)]
    for n, bucket in enumerate(buckets, start=1):
        assert n <= bucket <= 1.25 * n
        assert bucket_size(bucket) == bucket
    assert buckets == sorted(buckets)


@pytest.mark.parametrize("power", range(3, 12))
def test_four_buckets_to_each_doubling(power):
    sizes = range((1 << power) + 1, (2 << power) + 1)
    assert len({bucket_size(n) for n in sizes}) == 4
