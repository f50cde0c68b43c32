import dataclasses
import json

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.build import bytes_touched
from tests.generators import small_graph


@pytest.fixture
def graph():
    """Task 0 makes 10 and 20 bytes; task 1 reads both and a 3-byte input, makes 5."""
    return small_graph([100, 1000], [(0, 10, [1]), (0, 20, [1]), (1, 5, [])], [(-1, 3, [1])])


@pytest.fixture
def cluster():
    devices = {"flops_per_s": [100.0, 100.0], "memory_bytes_per_s": 10.0, "memory_bytes": 1e9}
    return dj.Cluster(**devices, launch_s=0.5, latency_s=2.0, link_bytes_per_s=4.0)


def test_roofline_takes_the_slower_of_arithmetic_and_memory(graph, cluster):
    assert bytes_touched(graph).tolist() == [30.0, 38.0]
    costs = dj.make_costs(graph, cluster)
    # Task 0: 1 s of arithmetic, 3 s of memory; task 1: 10 s and 3.8 s.
    assert costs.compute_s.tolist() == [[3.5, 3.5], [10.5, 10.5]]


def test_unequal_devices_and_links(graph, cluster):
    cluster = dataclasses.replace(
        cluster,
        flops_per_s=np.array([100.0, 1.0]),
        launch_s=np.array([0.5, 0.0]),
        latency_s=np.array([[0.0, 2.0], [3.0, 0.0]]),
        link_bytes_per_s=np.array([[np.inf, 4.0], [8.0, np.inf]]),
    )
    costs = dj.make_costs(graph, cluster)
    assert costs.compute_s.tolist() == [[3.5, 100.0], [10.5, 1000.0]]
    assert costs.latency_s.tolist() == [[0.0, 2.0], [3.0, 0.0]]
    assert costs.seconds_per_byte.tolist() == [[0.0, 0.25], [0.125, 0.0]]
    assert costs.tensor_bytes.tolist() == [10.0, 20.0, 5.0]
    assert costs.input_bytes.tolist() == [3.0]


@pytest.mark.parametrize("name", sorted(set(dj.clusters.list_clusters()) - {"host"}))
def test_every_preset_gives_valid_costs(graph, name):
    costs = dj.make_costs(graph, dj.make_cluster(name))
    assert costs.compute_s.shape == (2, dj.make_cluster(name).num_devices)
    assert (costs.compute_s > 0).all()
    assert (costs.latency_s + costs.seconds_per_byte)[0, -1] > 0


def test_an_empty_graph_has_costs(cluster):
    costs = dj.make_costs(dj.make_graph(flops=[]), cluster)
    assert costs.compute_s.shape == (0, 2)


def test_reference_costs_are_the_files_numbers_over_1e10(graph):
    costs = dj.reference_costs(graph, 3)
    np.testing.assert_allclose(costs.compute_s, [[1e-8] * 3, [1e-7] * 3], rtol=1e-15)
    moving_s = costs.latency_s + 20 * costs.seconds_per_byte
    np.testing.assert_allclose(moving_s, 2e-9 * (1 - np.eye(3)), rtol=1e-15)


def test_good_placements_have_their_published_makespans(reference_graphs):
    good = json.loads((reference_graphs / "good_placements.json").read_text())
    assert len(good) == 5
    for name, entry in good.items():
        graph = dj.load_graph(reference_graphs / f"{name}.txt")
        costs = dj.reference_costs(graph, entry["num_devices"])
        schedule = dj.simulator.simulate_oracle(graph, costs, entry["placement"])
        assert dj.simulator.makespan_s(schedule) == pytest.approx(
            entry["makespan"], rel=1e-12
        ), name


def test_edge_delays_wait_only_between_devices():
    graph, costs = dj.from_edge_delays(
        [1.0, 2.0, 4.0], [(0, 1, 8.0), (0, 2, 0.5)], num_devices=2
    )
    assert dj.simulator.makespan_s(dj.simulator.simulate_oracle(graph, costs, [0, 0, 0])) == 7.0
    assert (
        dj.simulator.makespan_s(dj.simulator.simulate_oracle(graph, costs, [0, 1, 0])) == 11.0
    )
    assert dj.simulator.makespan_s(dj.simulator.simulate_oracle(graph, costs, [0, 0, 1])) == 5.5


@pytest.mark.parametrize(
    ("weights", "edges", "num_devices", "message"),
    [
        ([1.0], [], 0, "num_devices is 0; expected at least 1"),
        ([1.0], [], -1, "num_devices is -1"),
        ([1.0], [(0, 1, 1.0)], 2, r"edge_reader\[0\] is 1, but there are 1 tasks"),
        ([1.0, 1.0], [(0, 1, -1.0)], 2, r"tensor_bytes\[0\] is -1.0"),
        ([1.0, np.nan], [], 2, r"flops\[1\] is nan"),
        ([1.0, 1.0], [(0, 1, 1.0), (1, 0, 1.0)], 2, "cycle"),
    ],
)
def test_faults_in_edge_delays_are_refused(weights, edges, num_devices, message):
    with pytest.raises(ValueError, match=message):
        dj.from_edge_delays(weights, edges, num_devices)


def test_costs_may_pin_a_task(graph, cluster):
    costs = dj.make_costs(graph, cluster)
    dj.costs.check_costs(
        graph, costs.replace(compute_s=np.array([[1.0, np.inf], [np.inf, 2.0]]))
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("compute_s", np.ones(2), r"compute_s has shape \(2,\); expected \[N, D\]"),
        ("compute_s", np.ones((2, 0)), "with D >= 1"),
        ("compute_s", np.ones((3, 2)), r"compute_s has shape \(3, 2\); expected \(2, 2\)"),
        ("compute_s", [[1, np.nan], [1, 1]], r"compute_s\[0, 1\] is nan"),
        ("compute_s", [[1, 1], [-1, 1]], r"compute_s\[1, 0\] is -1"),
        ("compute_s", [[1, 1], [-np.inf, 1]], r"compute_s\[1, 0\] is -inf"),
        ("compute_s", [[1, 1], [np.inf, np.inf]], "task 1 runs on no device"),
        ("tensor_bytes", [1, 2], r"tensor_bytes has shape \(2,\); expected \(3,\)"),
        ("tensor_bytes", [1, 2, np.inf], r"tensor_bytes\[2\] is inf; expected a finite"),
        ("input_bytes", [-1], r"input_bytes\[0\] is -1"),
        ("latency_s", np.zeros((3, 3)), r"latency_s has shape \(3, 3\); expected \(2, 2\)"),
        ("latency_s", [[0, 1], [1, 2]], r"latency_s\[1, 1\] is 2.* expected 0 on the diagonal"),
        ("seconds_per_byte", [[0, np.inf], [1, 0]], r"seconds_per_byte\[0, 1\] is inf"),
        ("seconds_per_byte", [[1, 1], [1, 0]], r"seconds_per_byte\[0, 0\] is 1"),
        ("handling_s", [1, 1], "handling_s and handling_s_per_byte go together; one of them"),
        ("capacity_bytes", [1], r"capacity_bytes has shape \(1,\); expected \(2,\)"),
        ("capacity_bytes", [np.inf, -1], r"capacity_bytes\[1\] is -1.* expected a number >= 0"),
    ],
)
def test_faults_in_costs_are_refused(graph, cluster, field, value, message):
    costs = dj.make_costs(graph, cluster).replace(**{field: np.asarray(value, dtype=float)})
    with pytest.raises(ValueError, match=message):
        dj.costs.check_costs(graph, costs)


def test_capacity_is_the_memory_of_the_cluster(graph, cluster):
    cluster = cluster.replace(memory_bytes=np.array([5.0, np.inf]))
    assert dj.make_costs(graph, cluster).capacity_bytes.tolist() == [5, np.inf]
    assert dj.reference_costs(graph, num_devices=3).capacity_bytes.tolist() == [np.inf] * 3
    _, costs = dj.from_edge_delays([1.0], [], num_devices=2)
    assert costs.capacity_bytes.tolist() == [np.inf] * 2


def test_an_input_at_home_nowhere_and_a_faulty_cluster_are_refused(graph, cluster):
    homeless = graph.replace(input_home=np.array([2]))
    with pytest.raises(ValueError, match=r"input_home\[0\] is 2, but there are 2 devices"):
        dj.make_costs(homeless, cluster)
    with pytest.raises(ValueError, match=r"flops_per_s\[1\] is 0.0"):
        dj.make_costs(graph, cluster.replace(flops_per_s=np.array([1.0, 0.0])))
