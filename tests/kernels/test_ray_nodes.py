"""The Ray backend over two local nodes of one cluster, one of which is killed in a call."""

import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import doppler_jax as dj
from tests.kernels.conftest import WORKLOADS, X, check, partitioned, spin_chain

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Seconds of work: a busy machine takes its time to kill a node.
SPINS = spin_chain(200)


@pytest.mark.slow
def test_two_nodes_and_the_loss_of_one():
    """In a process of its own: one connects to one Ray only, and other tests have theirs."""
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "tests.kernels.test_ray_nodes"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert ended.stdout.splitlines()[-1] == "the rest went on"


def main():
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "include_dashboard": False}  # so each has one of the devices
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(**node)
    cluster.wait_for_nodes()
    with dj.ray_devices(2, address=cluster.address) as devices:
        run_a_workload(devices)
        left = lose_a_node(devices, lambda: cluster.remove_node(second, allow_graceful=False))
        check(SPINS, dj.compile(SPINS, np.zeros(200, int), devices=left), rtol=1e-4)
    cluster.shutdown()
    print("the rest went on")


def run_a_workload(devices):
    sharded, args, fn = partitioned("ffnn", 2, **WORKLOADS["ffnn"])
    placement = np.arange(sharded.graph.num_tasks) % 2
    for mode in ("work_conserving", "bulk_synchronous"):
        step = dj.compile(sharded, placement, devices=devices, mode=mode)
        np.testing.assert_allclose(step(*args), fn(*args), atol=1e-4)
        dj.validate(sharded.graph, step.trace, tolerance=0)


def lose_a_node(devices, kill):
    """Kills a node in the middle of a call; returns the devices that are left."""
    step = dj.compile(SPINS, np.arange(200) % 2, devices=devices)
    step(X)
    timer = threading.Timer(step.trace.finish_s.max() / 16, kill)
    timer.start()
    with pytest.raises(dj.TaskError, match=r"^device \d \(.*was lost"):
        step(X)
    timer.join()
    left = devices.without_lost()
    assert len(left) == 1
    return left


if __name__ == "__main__":
    main()
