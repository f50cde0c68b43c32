import json
import os
import re

import jax
import numpy as np
import pytest

from doppler_jax.costs.clusters import (
    list_clusters,
    load_cluster,
    make_cluster,
    reference_cluster,
    save_cluster,
)
from doppler_jax.costs.host import measure_host
from doppler_jax.costs.random_clusters import ClusterKind, costs_of_ccr, random_cluster
from doppler_jax.graphs.families import make_family
from doppler_jax.graphs.levels import mean_compute_s, mean_transfer_s
from doppler_jax.types import Cluster

FIELDS = [
    "flops_per_s", "memory_bytes_per_s", "memory_bytes",
    "launch_s", "latency_s", "link_bytes_per_s",
]  # fmt: skip


@pytest.fixture(scope="module")
def clusters():
    """Every registered cluster; the host is measured once."""
    return {name: make_cluster(name) for name in list_clusters()}


@pytest.mark.parametrize("name", list_clusters())
def test_every_cluster_is_valid_and_survives_json(clusters, name, tmp_path):
    cluster = clusters[name]
    save_cluster(tmp_path / "c.json", cluster)
    loaded = load_cluster(tmp_path / "c.json")
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(loaded, field), getattr(cluster, field), field)
        assert getattr(loaded, field).dtype == np.float64


@pytest.mark.parametrize("name", list_clusters())
def test_names_end_in_their_number_of_devices(clusters, name):
    expected = jax.device_count() if name == "host" else int(name.split("x")[-1])
    assert clusters[name].num_devices == expected


def test_v100_islands_are_faster_inside_than_across(clusters):
    rate = clusters["v100x8"].link_bytes_per_s
    inside = np.kron(np.eye(2), np.ones((4, 4))) - np.eye(8) > 0
    across = np.kron(1 - np.eye(2), np.ones((4, 4))) > 0
    assert set(rate[inside]) == {50e9}
    assert set(rate[across]) == {10e9}


def test_host_is_measured_sane(clusters):
    cluster = clusters["host"]
    other = ~np.eye(jax.device_count(), dtype=bool)
    assert ((cluster.flops_per_s > 1e8) & (cluster.flops_per_s < 1e16)).all()
    rates = np.append(cluster.memory_bytes_per_s, cluster.link_bytes_per_s[other])
    assert ((rates > 1e7) & (rates < 1e14)).all()
    overheads = np.append(cluster.launch_s, cluster.latency_s[other])
    assert ((overheads > 1e-8) & (overheads < 0.1)).all()


def test_host_devices_share_the_machines_memory(clusters):
    if jax.default_backend() != "cpu":
        pytest.skip("only CPU devices share memory")
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert clusters["host"].memory_bytes.sum() == pytest.approx(installed)


def test_host_of_one_device_has_no_links():
    cluster = measure_host(jax.devices()[:1])
    assert cluster.link_bytes_per_s.tolist() == [[np.inf]]
    with pytest.raises(ValueError, match="devices is empty"):
        measure_host([])


def test_what_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown cluster 'p100'; known: .*p100x4, .*v100x8"):
        make_cluster("p100")
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/absent: No such file"):
        load_cluster(tmp_path / "absent")


def small_cluster(**changes):
    return Cluster(**{"flops_per_s": [1, 1], "latency_s": 1, "link_bytes_per_s": 1} | changes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("flops_per_s", [], r"flops_per_s has shape \(0,\); expected \[D\] with D >= 1"),
        ("flops_per_s", [[1.0]], r"flops_per_s has shape \(1, 1\)"),
        ("flops_per_s", [1.0, 0.0], r"flops_per_s\[1\] is 0.0; expected a positive number"),
        ("memory_bytes", [1.0], r"memory_bytes has shape \(1,\); expected \(2,\)"),
        ("memory_bytes_per_s", [1.0, np.nan], r"memory_bytes_per_s\[1\] is nan"),
        ("launch_s", [np.inf, 0.0], r"launch_s\[0\] is inf; expected a finite number >= 0"),
        ("latency_s", [[0.0, -1.0], [1.0, 0.0]], r"latency_s\[0, 1\] is -1.0"),
        ("latency_s", [[1.0, 1.0], [1.0, 0.0]], r"latency_s\[0, 0\] is 1.0; expected 0.0 on"),
        ("link_bytes_per_s", np.ones((2, 2)), r"link_bytes_per_s\[0, 0\] is 1.0; expected inf"),
        ("link_bytes_per_s", [[np.inf, 0], [1, np.inf]], r"link_bytes_per_s\[0, 1\] is 0.0"),
    ],
)
def test_faults_in_clusters_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        small_cluster(**{field: value})


def test_clusters_are_made_of_lists_and_numbers():
    cluster = Cluster(flops_per_s=[9e12, 1e12], memory_bytes=[1e9, 4e9], link_bytes_per_s=1e10)
    assert cluster.flops_per_s.dtype == np.float64
    np.testing.assert_array_equal(cluster.link_bytes_per_s, [[np.inf, 1e10], [1e10, np.inf]])
    np.testing.assert_array_equal(cluster.latency_s, np.zeros((2, 2)))
    assert cluster.launch_s.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"flops_per_s has shape \(\); expected \[D\]"):
        Cluster(flops_per_s=1e12)
    with pytest.raises(ValueError, match=r"link_bytes_per_s\[0, 1\] is -1.0; expected a pos"):
        Cluster(flops_per_s=[1.0, 1.0], link_bytes_per_s=-1.0)


def test_clusters_print_what_they_hold_in_a_few_lines():
    lines = repr(make_cluster("v100x8")).splitlines()
    assert lines[0] == "Cluster(8 devices):"
    assert "  memory_bytes: [8] 3.2e+10" in lines
    assert "  link_bytes_per_s: [8, 8] 1e+10 to 5e+10" in lines
    assert len(lines) == 7


@pytest.mark.parametrize("num_devices", [0, -1])
def test_no_devices_are_no_cluster(num_devices):
    with pytest.raises(ValueError, match=f"num_devices is {num_devices}"):
        reference_cluster(num_devices)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("launch_s", [0.0], r"launch_s has shape \(1,\); expected \(2,\)"),
        ("launch_s", [0.0, None], r"launch_s\[1\] is inf; expected a finite number"),
        ("launch_s", [0.0, "fast"], r"launch_s\[1\] is 'fast'; expected a number"),
        ("launch_s", [0.0, -1.0], r"launch_s\[1\] is -1.0"),
        ("version", 2, "field 'version': expected 1, found 2"),
        ("latency_s", [0.0, 1.0], r"latency_s\[0\] is 0.0; expected a list"),
        ("latency_s", [[0.0], [1.0, 0.0]], "latency_s: rows of unequal length"),
        ("format", "doppler_jax.task_graph", "field 'format': expected 'doppler_jax.cluster'"),
        ("speed", 1, "field 'speed' is unknown"),
    ],
)
def test_faults_in_files_name_the_field(tmp_path, field, value, message):
    path = tmp_path / "c.json"
    save_cluster(path, small_cluster())
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=message) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}: ")


def draw(**kind):
    return random_cluster(np.random.default_rng(0), ClusterKind(**kind))


def test_devices_and_islands_are_of_their_kind():
    cluster = draw(num_devices=3)
    assert cluster.flops_per_s.tolist() == [1.0] * 3
    assert np.unique(cluster.link_bytes_per_s).tolist() == [1.0, np.inf]
    speed = draw(num_devices=16, is_unequal=True).flops_per_s
    assert len(np.unique(speed)) == 16
    assert 1 / 3 <= speed.min() < speed.max() <= 1.0
    rate = draw(num_devices=8, num_islands=2).link_bytes_per_s
    assert (rate[:4, :4] >= 1).all()
    assert (rate[4:, 4:] >= 1).all()
    across = rate[:4, 4:]
    assert len(np.unique(across)) == 1
    assert 1 / 10 <= across[0, 0] <= 1 / 3


@pytest.mark.parametrize("ccr", [0.1, 10.0])
@pytest.mark.parametrize("latency_share", [0.0, 0.25])
def test_the_ratio_is_met(ccr, latency_share):
    graph = make_family("layered", np.random.default_rng(1), 40)
    cluster = draw(num_devices=4, is_unequal=True, num_islands=2)
    costs = costs_of_ccr(graph, cluster, ccr, latency_share)
    transfer_s = mean_transfer_s(costs)[graph.edge_tensor]
    np.testing.assert_allclose(transfer_s.mean() / mean_compute_s(costs).mean(), ccr)
    latency_s = costs.latency_s[0, 1]
    np.testing.assert_allclose(latency_s, latency_share * transfer_s.mean())
    # Faster devices stay faster, nearer ones nearer.
    assert (np.argsort(costs.compute_s[0]) == np.argsort(-cluster.flops_per_s)).all()
    assert costs.seconds_per_byte[0, 1] < costs.seconds_per_byte[0, 3]


def test_impossible_kinds_are_refused():
    with pytest.raises(ValueError, match="num_islands is 3; expected 1 to 2"):
        draw(num_devices=2, num_islands=3)
    with pytest.raises(ValueError, match="num_islands is 1; expected 1 to 0"):
        draw(num_devices=0)
