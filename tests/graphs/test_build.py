import numpy as np
import pytest

from doppler_jax.graphs.build import make_graph, task_edges, topological_order
from doppler_jax.types import RESIDENT
from tests.generators import small_graph

DIAMOND = {
    "flops": [1, 2, 3, 4],
    "tensor_producer": [0, 1, 2],
    "tensor_bytes": [10, 20, 30],
    "edge_tensor": [0, 0, 1, 2],
    "edge_reader": [1, 2, 3, 3],
}


def test_diamond_has_its_sizes_edges_and_types():
    graph = make_graph(**DIAMOND)
    assert (graph.num_tasks, graph.num_tensors) == (4, 3)
    assert (graph.num_edges, graph.num_inputs) == (4, 0)
    senders, receivers = task_edges(graph)
    assert senders.tolist() == [0, 0, 1, 2]
    assert receivers.tolist() == [1, 2, 3, 3]
    assert graph.flops.dtype == np.float64
    assert graph.edge_tensor.dtype == np.int64


def test_a_graph_may_be_empty_and_inputs_are_resident_by_default():
    graph = make_graph(flops=[])
    assert (graph.num_tasks, graph.num_tensors, graph.num_edges) == (0, 0, 0)
    assert topological_order(graph).tolist() == []
    graph = make_graph(flops=[1], input_bytes=[5, 6])
    assert graph.input_home.tolist() == [RESIDENT, RESIDENT]


def test_repeated_reads_collapse_to_the_first():
    graph = small_graph([1, 1, 1], [(0, 8, [2, 1, 2])], [(RESIDENT, 5, [1, 1])])
    assert graph.edge_reader.tolist() == [2, 1]
    assert graph.input_edge_reader.tolist() == [1]


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        (None, [2, 3, 1, 4, 0]),  # the smallest free id first
        ([-9.0, -1.0, -1.0, -1.0, -1.0], [2, 3, 1, 4, 0]),  # 0 is first, but waits for 4
        ([0, 0, 0, 0, -1], [4, 0, 2, 3, 1]),
        ([0, -np.inf, 1, 5, np.inf], [2, 3, 1, 4, 0]),
    ],
)
def test_order_takes_the_smallest_rank_of_the_free_tasks(rank, order):
    graph = small_graph(np.ones(5), [(4, 1, [0]), (3, 1, [1])])
    assert topological_order(graph, rank).tolist() == order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": [1, 2, -3, 4]}, r"flops\[2\] is -3.0"),
        ({"flops": [1, 2, 3, np.nan]}, r"flops\[3\] is nan"),
        ({"flops": [1, np.inf, 3, 4]}, r"flops\[1\] is inf"),
        ({"flops": [[1, 2], [3, 4]]}, "flops must have one dimension"),
        ({"tensor_bytes": [10, 20]}, "tensor_bytes has 2 entries for 3 tensors"),
        ({"tensor_bytes": [10, -1, 20]}, r"tensor_bytes\[1\] is -1.0"),
        ({"tensor_producer": [0, 1, 4]}, r"tensor_producer\[2\] is 4, but there are 4 tasks"),
        ({"tensor_producer": [0.0, 1.0, 2.0]}, "tensor_producer must hold integers"),
        ({"edge_tensor": [0, 0, 1, 3]}, r"edge_tensor\[3\] is 3, but there are 3 tensors"),
        ({"edge_reader": [1, 2, 3, 9]}, r"edge_reader\[3\] is 9, but there are 4 tasks"),
        ({"edge_reader": [1, 2, 3, -1]}, r"edge_reader\[3\] is -1"),
        ({"edge_reader": [1, 2, 3]}, "edge has 4 sources but 3 readers"),
        ({"edge_reader": [1, 0, 3, 3]}, "cycle: 0 -> 0"),
        ({"edge_reader": [1, 2, 0, 3]}, "cycle: (0 -> 1 -> 0|1 -> 0 -> 1)"),
        ({"input_bytes": [1], "input_home": [-2]}, "input_home holds -2"),
        ({"input_bytes": [1], "input_home": [0, 1]}, "input_home has 2 entries for 1 inputs"),
        ({"input_bytes": [1], "input_maker": []}, "input_maker has 0 entries for 1 inputs"),
        ({"input_bytes": [1], "input_maker": [4]}, r"input_maker\[0\] is 4, but there are 4"),
        ({"input_bytes": [1], "input_maker": [-2]}, r"input_maker\[0\] is -2"),
        (
            {"input_bytes": [1, 1], "input_home": [-1, 0], "input_maker": [3, 2]},
            "graph input 1 has the home 0 and the maker 2; expected one of them",
        ),
        ({"input_edge_input": [0], "input_edge_reader": [0]}, "there are 0 graph inputs"),
    ],
)
def test_what_is_no_graph_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_graph(**DIAMOND | change)
