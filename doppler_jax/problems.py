"""What a command line names: a workload or a graph file, on a cluster."""

import dataclasses
import pathlib
from typing import Literal

import jax

from doppler_jax.costs.build import make_costs
from doppler_jax.costs.clusters import find_cluster, load_cluster, save_cluster
from doppler_jax.costs.host import measure_host
from doppler_jax.graphs.formats import load_graph
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import trace
from doppler_jax.programs.workloads import Workload, make_workload
from doppler_jax.types import Cluster, Costs, ShardedProgram, TaskGraph

Strategy = Literal["planner", "uniform"]
"""How a workload's tensors are cut."""


@dataclasses.dataclass(frozen=True)
class ProblemSettings:
    """Which problem: every field is an option of the same name."""

    workload: str = "chainmm"
    """Name of a workload."""
    graph: pathlib.Path | None = None
    """A task graph's file, in place of a workload."""
    preset: str = "paper"
    """Sizes of the workload while it is simulated."""
    strategy: Strategy = "planner"
    """How a workload's tensors are cut."""
    carry: tuple[int, ...] = ()
    """Positions of its arguments that are what the call before returned, such as parameters."""
    cluster: str = "p100x4"
    """Name of a preset cluster, or a cluster's JSON file."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A placement problem, and the program behind it if there is one."""

    name: str
    cluster: Cluster
    graph: TaskGraph
    costs: Costs
    workload: Workload | None = None
    sharded: ShardedProgram | None = None


def use_host_devices(count: int) -> None:
    """Splits the CPU into `count` devices; for machines without an accelerator.

    Must come before anything starts JAX's backends; an accelerator's devices stay as they
    are.

    Raises:
      ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"host devices: {count}; expected at least 1")
    jax.config.update("jax_num_cpu_devices", count)


def local_devices() -> list[jax.Device]:
    """Returns this machine's devices to place on: accelerators if several, or CPU devices."""
    devices = jax.devices()
    return devices if len(devices) > 1 else jax.devices("cpu")


def choose(settings: ProblemSettings, runs: pathlib.Path) -> Chosen:
    """Returns what a stage's settings name.

    The cluster `host` is measured once and kept beside the runs, in host.json, so that a
    resumed run sees the same costs.
    """
    name = settings.cluster
    cluster = saved_host(runs) if name == "host" else find_cluster(name)
    label = pathlib.Path(name).stem
    if settings.graph is not None:
        return choose_graph(settings.graph, cluster, label)
    return choose_workload(
        settings.workload,
        settings.preset,
        cluster,
        label,
        settings.strategy,
        carry=settings.carry,
    )


def saved_host(folder: pathlib.Path) -> Cluster:
    """Returns the cluster in the folder's host.json, measuring this machine if it is absent.

    Raises:
      ValueError: the file is of another number of devices.
    """
    path = folder / "host.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_cluster(path, measure_host(local_devices()))
    cluster = load_cluster(path)
    if cluster.num_devices != len(local_devices()):
        raise ValueError(
            f"{path} describes {cluster.num_devices} devices, but this process has "
            f"{len(local_devices())}; remove the file to measure them afresh"
        )
    return cluster


def choose_workload(
    name: str,
    preset: str,
    cluster: Cluster,
    cluster_name: str,
    strategy: Strategy = "planner",
    num_shards: int | None = None,
    carry: tuple[int, ...] = (),
) -> Chosen:
    """Returns a workload cut for the devices of a cluster, from shapes alone.

    Tensors get `num_shards` blocks, by default the next power of two of the devices; `carry` is
    that of `trace`.
    """
    workload = make_workload(name, preset)
    if num_shards is None:
        num_shards = 1 << (cluster.num_devices - 1).bit_length()
    program = trace(workload.fn, *workload.args, carry=carry)
    sharded = partition(program, num_shards, strategy=strategy, cluster=cluster)
    return Chosen(
        name=f"{workload_label(name, preset, strategy, carry)}-{cluster_name}",
        cluster=cluster,
        graph=sharded.graph,
        costs=make_costs(sharded.graph, cluster),
        workload=workload,
        sharded=sharded,
    )


def workload_label(
    name: str, preset: str, strategy: Strategy, carry: tuple[int, ...] = ()
) -> str:
    """Returns what folders call a workload of some size, cut in some way."""
    carried = f"-carry{'_'.join(map(str, carry))}" if carry else ""
    return f"{name}-{preset}" + ("-uniform" if strategy == "uniform" else "") + carried


def choose_graph(path: pathlib.Path, cluster: Cluster, cluster_name: str) -> Chosen:
    """Returns the task graph of a file on a cluster."""
    graph = load_graph(path)
    return Chosen(
        name=f"{path.stem}-{cluster_name}",
        cluster=cluster,
        graph=graph,
        costs=make_costs(graph, cluster),
    )
