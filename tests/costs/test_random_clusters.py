import numpy as np
import pytest

from doppler_jax.costs.random_clusters import ClusterKind, costs_of_ccr, random_cluster
from doppler_jax.graphs.families import make_family
from doppler_jax.graphs.levels import mean_compute_s, mean_transfer_s


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


def test_refusals():
    with pytest.raises(ValueError, match="num_islands is 3; expected 1 to 2"):
        draw(num_devices=2, num_islands=3)
    with pytest.raises(ValueError, match="num_islands is 1; expected 1 to 0"):
        draw(num_devices=0)
