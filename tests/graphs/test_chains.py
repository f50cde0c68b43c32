import itertools

import numpy as np
import pytest

from doppler_jax.graphs import chains
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.chains import chain_cover
from doppler_jax.graphs.formats import load_graph
from tests.generators import random_problem, small_graph

SIZES = [0, 1, 2, 8, 64]


def graphs(num_tasks, count=10):
    rng = np.random.default_rng(num_tasks)
    return [random_problem(rng, num_tasks, 2)[0] for _ in range(count)]


def reachable(graph):
    """`[N, N]`: is there a path, of at least one edge, from row to column?"""
    reach = np.zeros((graph.num_tasks, graph.num_tasks), dtype=bool)
    reach[task_edges(graph)] = True
    for middle in range(graph.num_tasks):  # Warshall
        reach |= reach[:, middle, None] & reach[None, middle]
    return reach


def assert_covers(graph, cover, before):
    """Every task is in one chain, and each is `before` [N, N] the next of its chain."""
    assert sorted(itertools.chain.from_iterable(cover)) == list(range(graph.num_tasks))
    for chain in cover:
        for u, v in itertools.pairwise(chain):
            assert before[u, v]


@pytest.mark.parametrize("num_tasks", SIZES)
def test_every_task_is_in_one_chain_after_what_it_needs(num_tasks):
    for graph in graphs(num_tasks):
        assert_covers(graph, chain_cover(graph), reachable(graph))


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 8, 11])
def test_there_are_few_more_chains_than_the_largest_antichain_has_tasks(num_tasks):
    found, least = [], []
    for graph in graphs(num_tasks):
        related = reachable(graph)
        related |= related.T
        subsets = ((mask >> np.arange(num_tasks)) & 1 == 1 for mask in range(1 << num_tasks))
        least.append(max(int(s.sum()) for s in subsets if not related[s][:, s].any()))
        found.append(len(chain_cover(graph)))
    assert all(a >= b for a, b in zip(found, least, strict=True))
    assert sum(found) <= 1.02 * sum(least)


@pytest.mark.parametrize(
    ("name", "width"),
    [("chain_mm_112nodes", 32), ("ffnn_192nodes", 16), ("full_transformer_layer_261nodes", 15)],
)
def test_published_graphs_get_as_many_chains_as_they_are_wide(reference_graphs, name, width):
    # The widths were found by maximum matching on the transitive closure.
    assert len(chain_cover(load_graph(reference_graphs / f"{name}.txt"))) == width


def skipping_graph():
    """0 -> 2 -> 3 and 1 -> 2 -> 4: two chains, of which one must step over task 2."""
    return small_graph(np.ones(5), [(0, 1, [2]), (1, 1, [2]), (2, 1, [3, 4])])


def test_chains_step_over_tasks_of_other_chains_up_to_a_limit(monkeypatch):
    assert sorted(map(len, chain_cover(skipping_graph()))) == [2, 3]
    monkeypatch.setattr(chains, "MAX_JOINED_TASKS", 5)
    assert len(chain_cover(skipping_graph())) == 2


def test_chains_of_large_graphs_follow_edges(monkeypatch):
    monkeypatch.setattr(chains, "MAX_JOINED_TASKS", 4)
    assert len(chain_cover(skipping_graph())) == 3
    for graph in graphs(24):
        edge = np.zeros((24, 24), dtype=bool)
        edge[task_edges(graph)] = True
        assert_covers(graph, chain_cover(graph), edge)
