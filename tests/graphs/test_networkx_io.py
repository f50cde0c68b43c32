import networkx as nx
import numpy as np
import pytest

from doppler_jax.graphs.build import make_graph
from doppler_jax.graphs.networkx_io import from_networkx, to_networkx
from tests.generators import random_problem
from tests.graphs.comparing import assert_same


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_round_trip_is_exact(num_tasks, seed):
    graph, _ = random_problem(np.random.default_rng([seed, num_tasks]), num_tasks, 4)
    assert_same(from_networkx(to_networkx(graph)), graph)


def test_round_trip_keeps_tensor_ids_that_no_order_gives():
    graph = make_graph(
        flops=[0.1, 1e300, 5e-324],
        tensor_producer=[2, 0, 2, 1],
        tensor_bytes=[1 / 3, 2, 3, 4],
        edge_tensor=[2, 1, 0, 1],
        edge_reader=[0, 1, 1, 1],
        input_bytes=[7, 8],
        input_home=[-1, 3],
        input_edge_input=[1, 0, 1],
        input_edge_reader=[2, 2, 0],
    )
    assert_same(from_networkx(to_networkx(graph)), graph)


def test_networkx_with_a_size_per_node():
    nx_graph = nx.DiGraph()
    nx_graph.add_node("load", work=1, size=10)
    nx_graph.add_node(("mul", 0), work=2.5, size=20)
    nx_graph.add_edge("load", ("mul", 0))
    graph = from_networkx(nx_graph, flops="work", bytes="size")
    assert_same(
        graph,
        make_graph(
            flops=[1, 2.5], tensor_producer=[0, 1], tensor_bytes=[10, 20],
            edge_tensor=[0], edge_reader=[1],
        ),
    )  # fmt: skip


def test_networkx_with_a_size_per_edge():
    nx_graph = nx.DiGraph()
    nx_graph.add_nodes_from(["c", "a", "b"], flops=1)
    nx_graph.add_edge("a", "b", bytes=5)
    nx_graph.add_edge("a", "c", bytes=6)
    graph = from_networkx(nx_graph)
    assert graph.tensor_producer.tolist() == [1, 1]
    assert graph.tensor_bytes.tolist() == [5, 6]
    assert graph.edge_reader.tolist() == [2, 0]


def networkx_pair(node=None, edge=None, **first):
    nx_graph = nx.DiGraph()
    nx_graph.add_node("a", **{"flops": 1} | first)
    nx_graph.add_node("b", flops=1, **node or {})
    nx_graph.add_edge("a", "b", **edge or {})
    return nx_graph


@pytest.mark.parametrize(
    ("nx_graph", "message"),
    [
        (nx.Graph(), "undirected"),
        (networkx_pair(), "node 'a' has no attribute 'bytes'"),
        (networkx_pair(bytes=1), "node 'b' has no attribute 'bytes'"),
        (networkx_pair(bytes=1, edge={"bytes": 1}), "node 'a' has 'bytes', and so do edges"),
        (networkx_pair(flops="x", edge={"bytes": 1}), "node 'a': 'flops' is 'x'"),
        (networkx_pair(edge={"bytes": -1}), "edge 'a' -> 'b': 'bytes' is -1"),
        (networkx_pair(edge={"bytes": np.nan}), "edge 'a' -> 'b': 'bytes' is nan"),
        (networkx_pair(tensors={1: 5.0}), "tensor 0 is made by no node"),
        (
            networkx_pair(tensors={0: 5.0}, node={"tensors": {0: 1.0}}),
            "node 'b' makes tensor 0",
        ),
        (networkx_pair(tensors={0: 5.0}), "edge 'a' -> 'b' has no attribute 'tensor'"),
        (networkx_pair(tensors={0: 5.0}, edge={"tensor": 1}), "reads tensor 1, which node 'a'"),
        (networkx_pair(tensors={0: 5.0}, edge={"tensor": "0"}), "'tensor' is '0'; expected an"),
    ],
)
def test_faults_in_networkx_name_the_node_or_edge(nx_graph, message):
    with pytest.raises(ValueError, match=message):
        from_networkx(nx_graph)


def test_networkx_cycle_and_stray_input_reader():
    nx_graph = networkx_pair(bytes=1, node={"bytes": 1})
    nx_graph.add_edge("b", "a")
    with pytest.raises(ValueError, match="cycle"):
        from_networkx(nx_graph)
    nx_graph = to_networkx(make_graph(flops=[1.0], input_bytes=[4]))
    nx_graph.graph["input_edges"].append((0, 9))
    with pytest.raises(ValueError, match="read by 9, which is no node"):
        from_networkx(nx_graph)
