"""Networks with memory limits from another project's files."""

import json

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.dnn_partitioning import load_dnn_partitioning, load_split

FACTS = {  # tasks, edges, accelerators, bytes of all nodes, milliseconds on an accelerator
    "bert24": (32, 55, 5, 1_824_824_592, 92.406),
    "gnmt": (96, 122, 6, 2_466_507_520, 182.563),
    "inceptionv3": (326, 363, 12, 16_795_418_824, 310.969),
    "resnet50": (177, 193, 14, 19_410_956_452, 201.45),
}


def network():
    """Three nodes, listed out of order; node 5 feeds both others."""
    nodes = [
        {"id": node, "supportedOnFpga": int(node != 9), "cpuLatency": 10 * ms,
         "fpgaLatency": ms, "colorClass": node, "size": 10.0 * node}
        for node, ms in ((9, 2.0), (2, 3.0), (5, 1.0))
    ]  # fmt: skip
    edges = [{"sourceId": 5, "destId": reader, "cost": 4.0} for reader in (2, 9)]
    limits = {"maxFPGAs": 2, "maxCPUs": 2, "maxSizePerFPGA": 100}
    return {**limits, "nodes": nodes, "edges": edges}


def write(tmp_path, data):
    path = tmp_path / "network.json"
    path.write_text(json.dumps(data))
    return path


def test_fields_of_a_file(tmp_path):
    graph, costs = load_dnn_partitioning(write(tmp_path, network()))
    assert graph.tensor_producer.tolist() == [1]
    assert sorted(graph.edge_reader.tolist()) == [0, 2]
    inf = np.inf
    expected = [[3, 3, 30, 30], [1, 1, 10, 10], [inf, inf, 20, 20]]
    np.testing.assert_allclose(costs.compute_s, 1e-3 * np.array(expected))
    assert costs.input_bytes.tolist() == [20, 50, 90]
    assert graph.input_home.tolist() == [dj.graphs.RESIDENT] * 3
    assert graph.input_edge_reader.tolist() == [0, 1, 2]
    assert costs.capacity_bytes.tolist() == [100, 100, inf, inf]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ([0, 0, 2], 1 + 4 + 20),  # out to the host's memory
        ([1, 2, 2], 10 + 20),  # in takes 4, but the other core task takes longer
        ([1, 0, 2], 1 + 4 + 20),
        ([2, 2, 3], 10 + 30),  # cores share their memory
    ],
)
def test_results_go_through_the_memory_of_the_host(tmp_path, placement, expected):
    problem = load_dnn_partitioning(write(tmp_path, network()))
    schedule = dj.simulator.simulate_oracle(*problem, placement)
    assert dj.simulator.makespan_s(schedule) == pytest.approx(1e-3 * expected)
    if placement == [1, 0, 2]:
        assert schedule.start_s[0] == pytest.approx(1e-3 * (1 + 4 + 4))  # out and in


@pytest.mark.parametrize("name", FACTS)
def test_published_networks(neutral_graphs, name):
    path = neutral_graphs / "dnn_partitioning" / "LayerGraphs" / f"{name}_inference.json"
    graph, costs = load_dnn_partitioning(path)
    tasks, edges, accelerators, num_bytes, total_ms = FACTS[name]
    assert (graph.num_tasks, graph.num_edges) == (tasks, edges)
    assert graph.input_bytes.sum() == num_bytes
    assert np.isfinite(costs.capacity_bytes).sum() == accelerators
    assert costs.num_devices == accelerators + 8
    assert 1e3 * costs.compute_s[:, 0].sum() == pytest.approx(total_ms)
    assert 1e3 * costs.compute_s[:, -1].sum() == pytest.approx(10 * total_ms)
    # All nodes on one accelerator would be too much: the limits bind.
    assert num_bytes > costs.capacity_bytes[0] >= graph.input_bytes.max()


@pytest.mark.parametrize("name", FACTS)
def test_the_experts_splits(neutral_graphs, name):
    folder = neutral_graphs / "dnn_partitioning"
    placement = load_split(folder / "human-experts" / f"{name}_inference_expert.json", 6)
    assert placement.shape == (FACTS[name][0],)
    assert set(placement) == set(range(6))
    if name == "bert24":
        with pytest.raises(ValueError, match="nodes on accelerator 5, but there are 5"):
            load_split(folder / "human-experts" / f"{name}_inference_expert.json", 5)
        path = folder / "LayerGraphs" / f"{name}_inference.json"
        graph, costs = load_dnn_partitioning(path, num_accelerators=6)
        held = np.bincount(placement, graph.input_bytes, 14)
        assert held.max() == pytest.approx(0.95671765 * costs.capacity_bytes[0])


def test_a_split(tmp_path):
    fpgas, cpus = ([{"nodes": own} for own in of] for of in ([[9], [2], []], [[], [5]]))
    split = {"fpgas": fpgas, "cpus": cpus}
    assert load_split(write(tmp_path, split), 2).tolist() == [1, 3, 0]
    split["cpus"][0]["nodes"] = [9]
    with pytest.raises(ValueError, match=r"cpus\[0\]: node 9 is placed twice"):
        load_split(write(tmp_path, split), 2)
    with pytest.raises(ValueError, match="fpgas: expected a list of objects"):
        load_split(write(tmp_path, {"fpgas": [[1]]}), 2)
    with pytest.raises(ValueError, match=r"fpgas\[0\]: nodes: expected a list of ids"):
        load_split(write(tmp_path, {"fpgas": [{"nodes": 1}]}), 2)


def change(path, value):
    """Returns the network with the entry at `path` replaced."""
    data = place = network()
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes",), 3, "nodes: expected a list of objects"),
        (("nodes", 0, "size"), -1, "size is -1; expected a finite number"),
        (("nodes", 0, "id"), 2, r"nodes\[0\] and nodes\[1\] have one id"),
        (("nodes", 2, "colorClass"), 2, r"nodes\[1\] and nodes\[2\] have one colorClass"),
        (("edges", 0, "destId"), 7, r"edges\[0\] names node 7, which does not exist"),
        (("edges", 1, "cost"), 5, r"edges\[1\]: cost 5, but 4 on another edge from node 5"),
        (("edges", 0, "sourceId"), 2, "tasks form a cycle"),
        (("maxCPUs",), 0, "task 2 runs on no device"),
        (("maxFPGAs",), "two", "maxFPGAs is 'two'; expected a finite number"),
    ],
)
def test_what_is_no_network_is_refused(tmp_path, path, value, message):
    with pytest.raises(ValueError, match=rf"network\.json: {message}"):
        load_dnn_partitioning(write(tmp_path, change(path, value)))
