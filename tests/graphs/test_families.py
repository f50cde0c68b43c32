import numpy as np
import pytest

from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.families import HELD_OUT, list_families, make_family


def edges_of(graph):
    return list(zip(*(ends.tolist() for ends in task_edges(graph)), strict=True))


def draw(name, seed, num_tasks):
    return make_family(name, np.random.default_rng(seed), num_tasks)


@pytest.mark.parametrize("name", list_families())
@pytest.mark.parametrize("num_tasks", [4, 24, 100, 900])
def test_graphs_are_valid_and_about_as_large_as_asked(name, num_tasks):
    for seed in range(3):
        graph = draw(name, seed, num_tasks)  # make_graph refuses what is no task graph
        assert 0.5 * num_tasks <= graph.num_tasks <= 1.75 * num_tasks + 30
        assert (graph.flops > 0).all()
        assert (graph.tensor_bytes > 0).all()


@pytest.mark.parametrize("name", list_families())
def test_a_seed_decides_the_graph(name):
    same, again, other = (draw(name, seed, 60) for seed in (1, 1, 2))
    np.testing.assert_array_equal(same.flops, again.flops)
    np.testing.assert_array_equal(same.edge_reader, again.edge_reader)
    # Factorisations differ in the speeds of their kernels alone, at times not at all.
    if name not in ("cholesky", "lu"):
        assert same.flops.tolist() != other.flops.tolist()


def test_factorisations_of_few_tiles_are_as_in_books():
    graph = draw("cholesky", 0, 10)
    edges = set(edges_of(graph))
    # 0 factors (0, 0); 1 and 2 solve (1, 0), (2, 0); 3, 4, 5 update (1, 1), (2, 2), (2, 1).
    first = {(0, 1), (0, 2), (1, 3), (2, 4), (2, 5), (1, 5)}
    # 6 factors (1, 1), 7 solves (2, 1), 8 updates (2, 2), 9 factors it.
    assert edges == first | {(3, 6), (6, 7), (5, 7), (7, 8), (4, 8), (8, 9)}
    graph = draw("lu", 0, 4)
    edges = sorted(edges_of(graph))
    assert edges == [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]


def test_series_parallel_graphs_reduce_to_one_edge():
    graph = draw("series_parallel", 3, 40)
    edges = edges_of(graph)
    for _ in range(200):
        edges = sorted(set(edges))  # parallel ways become one
        for v in range(2, graph.num_tasks):
            into, out = [e for e in edges if e[1] == v], [e for e in edges if e[0] == v]
            if len(into) == len(out) == 1:
                edges = [e for e in edges if v not in e] + [(into[0][0], out[0][1])]
                break
        else:
            break
    assert edges == [(0, 1)]


def test_a_tree_has_one_way_between_its_root_and_each_task():
    directions = set()
    for seed in range(12):
        graph = draw("tree", seed, 40)
        senders, receivers = task_edges(graph)
        assert len(senders) == graph.num_tasks - 1
        readers = np.bincount(senders, minlength=graph.num_tasks)
        sources = np.bincount(receivers, minlength=graph.num_tasks)
        directions.add("out" if (sources <= 1).all() else "in")
        assert (sources <= 1).all() or (readers <= 1).all()
    assert directions == {"out", "in"}


def test_a_butterfly_mixes_all_columns():
    graph = draw("butterfly", 0, 32)  # 8 columns of 4 stages, or 4 columns of 8
    senders, receivers = task_edges(graph)
    width = int((np.bincount(receivers, minlength=graph.num_tasks) == 0).sum())
    reached = [{v} if v < width else set() for v in range(graph.num_tasks)]
    for u, v in sorted(edges_of(graph), key=lambda edge: edge[1]):
        reached[v] |= reached[u]
    assert all(len(found) == width for found in reached[-width:])
    assert (np.bincount(senders, minlength=graph.num_tasks)[:-width] == 2).all()


def test_a_stencil_is_swept_or_reads_its_neighbours():
    kinds = set()
    for seed in range(8):
        graph = draw("stencil", seed, 36)
        receivers = task_edges(graph)[1]
        most = int(np.bincount(receivers, minlength=graph.num_tasks).max())
        kinds.add(most)
        # Swept from one corner there is one task to begin with.
        if most == 2:
            assert len(set(range(graph.num_tasks)) - set(receivers.tolist())) == 1
    assert kinds == {2, 3}


def test_a_random_dag_reads_what_comes_before():
    edges = edges_of(draw("random_dag", 0, 80))
    assert len(edges) > 40
    assert all(u < v for u, v in edges)


def test_held_out_families_exist():
    assert set(HELD_OUT) < set(list_families())


def test_refusals():
    with pytest.raises(ValueError, match="unknown family 'star'; known: butterfly, "):
        draw("star", 0, 20)
    with pytest.raises(ValueError, match="num_tasks is 3"):
        draw("lu", 0, 3)
