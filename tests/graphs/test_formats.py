import dataclasses

import networkx as nx
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.graphs.build import task_edges
from tests.commands import graph_json
from tests.generators import random_problem, small_graph

# 1 graph input, 3 tasks, edges 0 -> 1 and 0 -> 2.
TEXT = ["4", "0,", "0, 0,", "1, 2,", "5,20", "6, 24,matmul", "7,28"]


def assert_same(graph, expected):
    """Every field of the two graphs has the same type and values, in the same order."""
    for field in dataclasses.fields(expected):
        value, wanted = getattr(graph, field.name), getattr(expected, field.name)
        np.testing.assert_array_equal(value, wanted, field.name, strict=True)


def write(path, text):
    path.write_text(text)
    return path


def assert_refused(path, message, load=dj.load_graph):
    """It is refused in one line, which starts with the path."""
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_text_has_no_bytes_and_so_no_memory_to_limit(reference_graphs, tmp_path):
    graph = dj.load_graph(reference_graphs / "ffnn_192nodes.txt")
    dj.graphs.save_graph(tmp_path / "g.json", graph)
    again = dj.load_graph(tmp_path / "g.json")
    assert_same(again, graph)
    assert not graph.has_bytes
    for known in (graph, again):
        assert np.isinf(dj.make_costs(known, dj.make_cluster("p100x4")).capacity_bytes).all()
    sized = dj.make_costs(graph.replace(has_bytes=True), dj.make_cluster("p100x4"))
    assert sized.capacity_bytes.tolist() == [16e9] * 4
    (tmp_path / "g.json").write_text((tmp_path / "g.json").read_text().replace("false", "0"))
    with pytest.raises(ValueError, match="has_bytes is 0; expected true or false"):
        dj.load_graph(tmp_path / "g.json")


@pytest.mark.parametrize(
    ("name", "num_tasks", "num_edges"),
    [
        ("chain_mm_112nodes", 76, 80),
        ("ffnn_192nodes", 180, 208),
        ("gdp_ffnn_192nodes", 180, 208),
        ("transformer_block_215nodes", 182, 234),
        ("full_transformer_layer_261nodes", 229, 284),
        ("8gpu_transformer_block", 302, 398),
    ],
)
def test_published_graphs_have_their_published_sizes(
    reference_graphs, name, num_tasks, num_edges
):
    graph = dj.load_graph(reference_graphs / f"{name}.txt")
    assert graph.num_tasks == graph.num_tensors == num_tasks
    assert graph.num_edges == num_edges
    np.testing.assert_array_equal(graph.tensor_bytes, 4 * graph.flops)


def test_published_graphs_with_a_stray_number_and_an_op_type_column(reference_graphs):
    graph = dj.load_graph(reference_graphs / "chain_mm_112nodes.txt")
    senders, receivers = task_edges(graph)
    assert list(zip(senders[:3], receivers[:3], strict=True)) == [(0, 16), (1, 6), (2, 16)]
    assert graph.flops[0] == 1e12
    graph = dj.load_graph(reference_graphs / "gdp_ffnn_192nodes.txt")
    assert_same(graph, dj.load_graph(reference_graphs / "ffnn_192nodes.txt"))


def test_text_by_hand(tmp_path):
    graph = dj.load_graph(write(tmp_path / "g.txt", "\n".join(TEXT) + "\n\n"))
    tensors = [(0, 20, [1, 2]), (1, 24, []), (2, 28, [])]
    assert_same(graph, small_graph([5, 6, 7], tensors, has_bytes=False))
    graph = dj.load_graph(write(tmp_path / "g.txt", "1\n\n\n\n5,20\n"))
    assert (graph.num_tasks, graph.num_edges) == (1, 0)


@pytest.mark.parametrize(
    ("line", "replacement", "message"),
    [
        (1, "4 4", "line 1: expected the number of nodes"),
        (1, "four", "line 1: expected integers, found 'four'"),
        (1, "5", r"5 nodes \(line 1\) less 1 graph inputs \(line 2\) are 4 tasks, but 3"),
        (2, "0, 1,", "are 2 tasks, but 3 task lines"),
        (3, "0, x,", "line 3: expected integers, found 'x'"),
        (3, "0, 0, 1,", r"3 edge sources \(line 3\) but 2 edge destinations \(line 4\)"),
        (3, "0, -1,", "line 3: an edge names task -1, but there are 3 tasks"),
        (4, "1, 3,", "line 4: an edge names task 3, but there are 3 tasks"),
        (4, "1, 2.5,", "line 4: expected integers, found '2.5'"),
        (4, "1, 0,", "tasks form a cycle: 0 -> 0"),
        (5, "5", "line 5: expected `compute, communication"),
        (5, "", "line 5: expected `compute, communication"),
        (5, "5,20,a,b", "line 5: expected `compute, communication"),
        (6, "nan,24", "line 6: compute is 'nan'"),
        (6, "-6,24", "line 6: compute is '-6'"),
        (7, "7, inf", "line 7: communication is 'inf'"),
        (7, "7,-28", "line 7: communication is '-28'"),
        (7, "7,", "line 7: communication is ''"),
        (7, "7,\0", "not a text file"),
    ],
)
def test_faults_in_text_name_the_line(tmp_path, line, replacement, message):
    lines = list(TEXT)
    lines[line - 1] = replacement
    assert_refused(write(tmp_path / "bad.txt", "\n".join(lines)), message)


@pytest.mark.parametrize("num_lines", range(len(TEXT)))
def test_text_cut_after_a_line_is_refused(tmp_path, num_lines):
    assert_refused(write(tmp_path / "cut.txt", "\n".join(TEXT[:num_lines])), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b"\x89PNG\r\n\x1a\n", "not a text file"),
        (b"4\n\0\n", "not a text file"),
        (b"0\n\n\n\n", "expected 4"),
    ],
)
@pytest.mark.parametrize("load", [dj.load_graph, dj.graphs.load_stg])
def test_what_is_no_graph_file_is_refused(tmp_path, load, content, message):
    path = tmp_path / "bad"
    path.write_bytes(content)
    if load is dj.graphs.load_stg and content.startswith(b"0"):
        message = "0 task lines follow"
    assert_refused(path, message, load)


@pytest.mark.parametrize("load", [dj.load_graph, dj.graphs.load_stg])
def test_missing_file_and_directory_are_refused(tmp_path, load):
    assert_refused(tmp_path / "absent.txt", r"absent\.txt: No such file", load)
    assert_refused(tmp_path, ": Is a directory", load)


@pytest.mark.parametrize("num_tasks", [1, 2, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_json_round_trip_is_exact(tmp_path, num_tasks, seed):
    rng = np.random.default_rng([seed, num_tasks])
    graph, _ = random_problem(rng, num_tasks, 4, makers=bool(seed % 2))
    dj.graphs.save_graph(tmp_path / "g.json", graph)
    assert_same(dj.load_graph(tmp_path / "g.json"), graph)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (graph_json()[:-20], r"line 1 column \d+: not valid JSON"),
        ("{", "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        (graph_json(flops=[1, float("nan")]), "NaN is no JSON number"),
        (graph_json(flops=[1, float("inf")]), "Infinity is no JSON number"),
        (graph_json().replace("1.0", "1e999"), r"flops\[0\] is inf"),
        (graph_json(flops=[1, -2]), r"flops\[1\] is -2.0; expected a finite number"),
        (graph_json(flops=[1, "2"]), r"flops\[1\] is '2'; expected a number"),
        (graph_json(flops=[1, True]), r"flops\[1\] is True; expected a number"),
        (graph_json(flops=[1, 10**400]), "flops: .* a number too large"),
        (graph_json(flops=3), "flops is 3; expected a list"),
        (graph_json(flops=[[1, 2]]), r"flops\[0\] is \[1, 2\]; expected a number"),
        (graph_json(edge_reader=[1.0]), r"edge_reader\[0\] is 1.0; expected an integer"),
        (graph_json(edge_reader=[2]), r"edge_reader\[0\] is 2, but there are 2 tasks"),
        (graph_json(edge_reader=[10**30]), "edge_reader: .* a number too large"),
        (graph_json(edge_reader=[0]), "tasks form a cycle"),
        (graph_json(edge_reader=None), "field 'edge_reader' is missing"),
        (graph_json(colour=1), "field 'colour' is unknown"),
        (graph_json(format="other"), "field 'format': expected 'doppler_jax.task_graph'"),
        (graph_json(version=2), "field 'version': expected 1, found 2"),
        (graph_json(version=None), "field 'version': expected 1, found nothing"),
        ('{"flops": [], ' + graph_json()[1:], "field 'flops' is given twice"),
        (graph_json(flops=[], tensor_producer=[], tensor_bytes=[], edge_tensor=[],
                    edge_reader=[]), "the graph has no tasks"),
    ],
)  # fmt: skip
def test_faults_in_json_name_the_field(tmp_path, text, message):
    assert_refused(write(tmp_path / "bad.json", text), message)


def test_saving_replaces_or_does_nothing(tmp_path):
    path = write(tmp_path / "g.json", "precious")
    graph = dj.make_graph(flops=[1.0])
    with pytest.raises(ValueError, match=r"flops\[0\]|not JSON compliant"):
        dj.graphs.save_graph(path, graph.replace(flops=np.array([np.nan])))
    names = ("tensor_producer", "tensor_bytes", "edge_tensor", "edge_reader")
    cyclic = graph.replace(**dict.fromkeys(names, np.array([0])))
    with pytest.raises(ValueError, match="cycle"):
        dj.graphs.save_graph(path, cyclic)
    assert path.read_text() == "precious"
    dj.graphs.save_graph(path, graph)
    assert_same(dj.load_graph(path), graph)
    assert [entry.name for entry in tmp_path.iterdir()] == ["g.json"]


def test_saving_where_nothing_can_be_is_refused(tmp_path):
    graph = dj.make_graph(flops=[1.0])
    with pytest.raises(ValueError, match=r"absent/g\.json: No such file"):
        dj.graphs.save_graph(tmp_path / "absent" / "g.json", graph)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder: Is a directory"):
        dj.graphs.save_graph(tmp_path / "folder", graph)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


STG = ["  1", "0 0 0", "1 9 1 0", "2 0 2 0 1", "# a comment"]


def test_standard_task_graph_by_hand(tmp_path):
    path = write(tmp_path / "g.stg", "\n".join(STG))
    assert dj.graphs.load_stg(path) == (
        [0.0, 9.0, 0.0],
        [(0, 1, 0.0), (0, 2, 0.0), (1, 2, 0.0)],
    )


@pytest.mark.parametrize(
    ("line", "replacement", "message"),
    [
        (1, "1 2", "the first line must hold the number of tasks alone"),
        (1, "5", "line 1 announces 5 tasks beside 2 dummies, but 3"),
        (2, "1 0 0", "line 2: expected task 0, found task 1"),
        (3, "0 9 1 0", "line 3: expected task 1, found task 0"),
        (3, "1 -9 1 0", "line 3: time is -9"),
        (3, "1 9.5 1 0", "line 3: expected integers, found '9.5'"),
        (4, "2 0 2 0 7", "line 4: an edge names task 7, but there are 3 tasks"),
        (4, "2 0 2 0", "line 4: expected id, time, number of predecessors"),
        (4, "2 0", "line 4: expected id, time, number of predecessors"),
    ],
)
def test_faults_in_standard_task_graphs_name_the_line(tmp_path, line, replacement, message):
    lines = list(STG)
    lines[line - 1] = replacement
    assert_refused(write(tmp_path / "bad.stg", "\n".join(lines)), message, dj.graphs.load_stg)


def test_networkx_with_a_size_per_node_or_edge():
    nx_graph = nx.DiGraph()
    nx_graph.add_node("load", work=1, size=10)
    nx_graph.add_node(("mul", 0), work=2.5, size=20)
    nx_graph.add_edge("load", ("mul", 0))
    graph = dj.from_networkx(nx_graph, flops="work", bytes="size")
    assert_same(graph, small_graph([1, 2.5], [(0, 10, [1]), (1, 20, [])]))
    nx_graph = nx.DiGraph()
    nx_graph.add_nodes_from(["c", "a", "b"], flops=1)
    nx_graph.add_edge("a", "b", bytes=5)
    nx_graph.add_edge("a", "c", bytes=6)
    graph = dj.from_networkx(nx_graph)
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
    ],
)
def test_faults_in_networkx_name_the_node_or_edge(nx_graph, message):
    with pytest.raises(ValueError, match=message):
        dj.from_networkx(nx_graph)


def test_networkx_cycle():
    nx_graph = networkx_pair(bytes=1, node={"bytes": 1})
    nx_graph.add_edge("b", "a")
    with pytest.raises(ValueError, match="cycle"):
        dj.from_networkx(nx_graph)
