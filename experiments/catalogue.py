"""A placement problem by its name.

- `chain_mm_112nodes`: a published graph with its reference costs, on 4 devices, or `@D`;
- `stg50/rand0000@4`: of the Standard Task Graph set, on 4 equal devices;
- `dnn/bert24_inference`: a profiled network on accelerators with little memory;
- `chainmm:p100x4:uniform`: workload, cluster and cut; `chainmm/small` at another preset's
  sizes; `uniform8` for 8 blocks a tensor;
- `llama_8` and the others in `SIZED`: workloads at sizes of their own;
- `cholesky-3`: the third graph of a family, on a random cluster; `lu-3~20` of about 20 tasks;
- `islands-3`: of several families, on 8 unequal devices in two islands;
- `layers-1000@4`: 1,000 tasks in layers of 16, on 4 devices; `layers64-1000` in layers of 64;
- `tiny-3`: a random graph of at most 10 tasks;
- `my/graph.json:p100x4`: a file in any format that `dj.load_graph` reads, on a cluster.

A cluster is a preset's name or a JSON file.
"""

import csv
import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

import doppler_jax as dj
from doppler_jax.costs.dnn_partitioning import load_dnn_partitioning
from doppler_jax.costs.random_clusters import ClusterKind, costs_of_ccr, random_cluster
from doppler_jax.files import parse_json_object, read_text
from doppler_jax.graphs.families import HELD_OUT, list_families, make_family
from doppler_jax.problems import Chosen
from doppler_jax.programs.workloads import Workload

PUBLISHED = (
    "chain_mm_112nodes", "ffnn_192nodes", "transformer_block_215nodes",
    "full_transformer_layer_261nodes",
)  # fmt: skip
"""Graphs whose best placements on 4 devices we keep."""

BEST_PLACEMENTS = pathlib.Path(__file__).with_name("best_placements.json")
"""Plans by queue and problem, under `parallel` links, with how they were found."""

WORKLOADS = ("chainmm", "ffnn", "llama_block", "llama_layer")
"""Those of the paper."""

PAPER = tuple(f"{name}:p100x4:uniform" for name in WORKLOADS)
"""They as the paper has them: on 4 P100, every tensor cut alike."""

SIZED = {
    "random_layered_1k": ("random_layered", {"num_tasks": 57}, "p100x4"),
    "llama_8": ("llama", {"num_layers": 8}, "p100x4"),
    "random_layered_4k": ("random_layered", {"num_tasks": 88}, "v100x8"),
    "llama_32": ("llama", {"num_layers": 32}, "v100x8"),
}
"""Workload, its sizes beside those of `paper`, and cluster; cut uniformly, a block a device."""

HELD_OUT_TASKS = (48, 96, 180, 240)
"""Tasks of the held-out graphs, about."""

HELD_OUT_CLUSTERS = {
    "4 equal": ClusterKind(4),
    "4 unequal": ClusterKind(4, is_unequal=True),
    "8 equal in 2 islands": ClusterKind(8, num_islands=2),
    "8 unequal in 2 islands": ClusterKind(8, is_unequal=True, num_islands=2),
}
"""Clusters that they are placed on, in turn."""

ISLAND_FAMILIES = (
    "cholesky", "fork_join", "layered", "lu", "series_parallel", "tensor_program",
)  # fmt: skip
"""Families of `islands-N`, in turn."""

CCR = (0.1, 10.0)
"""Communication over computation of the random problems."""

WIDTH = 16
"""Tasks of a layer of `layers-N` unless the name says otherwise."""

KINDS = (
    "layers-N@D", "tiny-N", "islands-N", "FAMILY-N", "FAMILY-N~TASKS", "stg50/NAME@D",
    "dnn/NAME", "WORKLOAD:CLUSTER", "WORKLOAD/PRESET:CLUSTER:CUT", "FILE:CLUSTER",
)  # fmt: skip
"""Names of many problems, for messages; see the module."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A graph with its costs, and what is known of them."""

    name: str
    graph: dj.graphs.TaskGraph
    costs: dj.Costs
    cluster: dj.Cluster | None = None
    workload: Workload | None = None
    sharded: dj.programs.ShardedProgram | None = None
    best_known_s: float | None = None  # proven optimal where equal to the bound
    bound_s: float | None = None  # published: no schedule is shorter

    @property
    def program(self) -> dj.programs.ShardedProgram:
        """What is run, of a workload that was cut."""
        assert self.sharded is not None
        return self.sharded

    def chosen(self) -> Chosen:
        """Returns the problem as the stages take it; stage 3 asks for the costs alone."""
        cluster = self.cluster or dj.make_cluster("p100x4")
        parts = self.graph, self.costs, self.workload, self.sharded
        return Chosen(self.name, cluster, *parts)


@lru_cache(maxsize=4)
def load_problem(name: str, shared: pathlib.Path = pathlib.Path("../shared")) -> Problem:
    """Returns a problem by its name, see the module.

    Args:
      name: of the problem.
      shared: folder with `reference_graphs` and `neutral_graphs`.

    Raises:
      ValueError: there is no such problem, or a file that it needs is missing or invalid.
    """
    stem, _, devices = name.partition("@")
    published = shared / "reference_graphs" / f"{stem}.txt"
    if published.exists():
        graph = dj.load_graph(published)
        count = int(devices) if devices else 4
        known_s = best_known_s(stem) if count == 4 else None
        costs = dj.reference_costs(graph, num_devices=count)
        return Problem(name, graph, costs, best_known_s=known_s)
    if stem.startswith("stg50/"):
        return _stg(name, shared / "neutral_graphs" / "stg50", stem[6:], int(devices or 4))
    if name.startswith("dnn/"):
        folder = shared / "neutral_graphs" / "dnn_partitioning" / "LayerGraphs"
        return Problem(name, *load_dnn_partitioning(folder / f"{name[4:]}.json"))
    if name in SIZED:
        kind, sizes, cluster = SIZED[name]
        return _cut(
            name, dj.workloads.make_workload(kind, "paper", **sizes), cluster, "uniform", None
        )
    if found := re.fullmatch(r"layers(\d*)-(\d+)", stem):
        width = int(found[1] or WIDTH)
        return Problem(name, *layered_problem(int(found[2]), int(devices or 4), width))
    if found := re.fullmatch(r"(islands|tiny)-(\d+)", name):
        maker = _tiny_problem if found[1] == "tiny" else _island_problem
        return maker(name, int(found[2]))
    if found := re.fullmatch(rf"({'|'.join(list_families())})-(\d+)(?:~(\d+))?", name):
        return _family_problem(name, found[1], int(found[2]), found[3])
    return _named_cut(name, shared)


def file_digest(name: str) -> str | None:
    """Returns what the files of this name hold in few characters, None for other problems."""
    files = [path for part in name.split(":") if (path := pathlib.Path(part)).is_file()]
    content = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(content).hexdigest()[:16] if files else None


def best_plan(name: str, queue: str) -> dict[str, Any] | None:
    """Returns the best plan that is kept of a problem under a queue, None if none is."""
    kept = parse_json_object(BEST_PLACEMENTS, read_text(BEST_PLACEMENTS))
    return kept[queue].get(name)


def best_known_s(name: str) -> float | None:
    """Returns the least makespan known of a published graph on 4 devices, under `fifo`."""
    kept = best_plan(name, "fifo")
    return kept["makespan_s"] if kept else None


def load_cluster(name: str) -> dj.Cluster:
    """Returns the cluster of a preset's name or of a JSON file."""
    return dj.load_cluster(name) if name.endswith(".json") else dj.make_cluster(name)


def load_optima(path: pathlib.Path) -> Mapping[str, tuple[float, float]]:
    """Returns bound and best known makespan by a graph's name, of a `Case50_P_OPT.csv`.

    Its columns are file, devices, and the optimum; or, where that is not known, a lower
    bound and the best known makespan.

    Raises:
      ValueError: the file cannot be read, or a line is no such row.
    """
    optima = {}
    for number, row in enumerate(csv.reader(read_text(path).splitlines()), start=1):
        try:
            name, _, bound, *rest = row
            (best,) = rest or (bound,)
            known = float(bound), float(best)
        except ValueError as error:
            raise ValueError(
                f"{path}: line {number}: expected file, devices, optimum or bound and best "
                f"known, found {row}"
            ) from error
        optima[name.rsplit("/", 1)[-1].removesuffix(".stg")] = known
    return optima


def _stg(name: str, folder: pathlib.Path, stem: str, num_devices: int) -> Problem:
    optima = load_optima(folder / f"Case50_{num_devices}_OPT.csv")
    if stem not in optima:
        raise ValueError(f"{name}: no makespan is published for {num_devices} devices")
    problem = dj.from_edge_delays(
        *dj.graphs.load_stg(folder / f"{stem}.stg"), num_devices=num_devices
    )
    bound_s, best_s = optima[stem]
    return Problem(name, *problem, best_known_s=best_s, bound_s=bound_s)


def _named_cut(name: str, shared: pathlib.Path) -> Problem:
    """Returns the problem of WORKLOAD[/PRESET]:CLUSTER[:CUT] or FILE:CLUSTER."""
    what, _, rest = name.partition(":")
    cluster, _, cut = rest.partition(":")
    if not cluster:
        published = sorted(path.stem for path in (shared / "reference_graphs").glob("*.txt"))
        known = ", ".join([*published, *SIZED, *KINDS])
        raise ValueError(f"unknown problem {name!r}; known: {known}")
    if pathlib.Path(what).is_file():
        graph, on = dj.load_graph(what), load_cluster(cluster)
        return Problem(name, graph, dj.make_costs(graph, on), on)
    kind, _, preset = what.partition("/")
    found = re.fullmatch(r"(planner|uniform)(\d*)", cut or "planner")
    if found is None:
        raise ValueError(f"{name}: unknown cut {cut!r}; known: planner, uniform, uniform8")
    workload = dj.workloads.make_workload(kind, preset or "paper")
    return _cut(name, workload, cluster, found[1], int(found[2]) if found[2] else None)


def _cut(
    name: str, workload: Workload, cluster: str, strategy: str, num_shards: int | None
) -> Problem:
    on = load_cluster(cluster)
    count = num_shards or 1 << (on.num_devices - 1).bit_length()  # a power of two
    program = dj.trace(workload.fn, *workload.args)
    sharded = dj.partition(program, count, strategy=strategy, cluster=on)
    costs = dj.make_costs(sharded.graph, on)
    return Problem(name, sharded.graph, costs, on, workload, sharded)


def held_out_cluster(number: int) -> str:
    """Returns what the graph of a number in a family is placed on."""
    return tuple(HELD_OUT_CLUSTERS)[number // len(HELD_OUT_TASKS) % len(HELD_OUT_CLUSTERS)]


def _family_problem(name: str, family: str, number: int, num_tasks: str | None) -> Problem:
    """Returns a problem whose costs are those of a cluster, so that files can hold it."""
    families = [*HELD_OUT, *list_families()]
    rng = np.random.default_rng([families.index(family), number])
    count = int(num_tasks or HELD_OUT_TASKS[number % len(HELD_OUT_TASKS)])
    graph = make_family(family, rng, count)
    return _on_random_cluster(name, graph, rng, HELD_OUT_CLUSTERS[held_out_cluster(number)])


def _island_problem(name: str, number: int) -> Problem:
    rng = np.random.default_rng([77, number])
    num_tasks = int(np.exp(rng.uniform(*np.log((30, 300)))))
    graph = make_family(island_family(number), rng, num_tasks)
    kind = ClusterKind(8, is_unequal=True, num_islands=2)
    return _on_random_cluster(name, graph, rng, kind)


def island_family(number: int) -> str:
    """Returns the family of the graph `islands-NUMBER`."""
    return ISLAND_FAMILIES[number % len(ISLAND_FAMILIES)]


def _on_random_cluster(
    name: str, graph: dj.graphs.TaskGraph, rng: np.random.Generator, kind: ClusterKind
) -> Problem:
    """Returns a graph on a cluster whose links make a random CCR."""
    ccr = float(np.exp(rng.uniform(*np.log(CCR))))
    cluster = random_cluster(rng, kind)
    wanted, found = costs_of_ccr(graph, cluster, ccr), dj.make_costs(graph, cluster)
    slower = wanted.seconds_per_byte.sum() / found.seconds_per_byte.sum()
    rate = cluster.link_bytes_per_s / slower
    cluster = dataclasses.replace(cluster, link_bytes_per_s=rate)
    return Problem(name, graph, dj.make_costs(graph, cluster), cluster)


def _tiny_problem(name: str, number: int) -> Problem:
    """Returns a graph of 5 to 10 tasks on 2 or 3 devices, every other pair of them equal."""
    rng = np.random.default_rng(number)
    graph = make_family("random_dag", rng, int(rng.integers(5, 11)))
    kind = ClusterKind(2 + number % 2, is_unequal=number // 2 % 2 == 1)
    return _on_random_cluster(name, graph, rng, kind)


def layered_problem(
    num_tasks: int, num_devices: int, width: int = WIDTH
) -> tuple[dj.graphs.TaskGraph, dj.Costs]:
    """Returns a graph of layers of `width` tasks, on equal devices.

    A task reads its counterpart in the layer above and up to two others there, so that
    `width` chains hold all tasks. Run times and delays are lognormal, of equal means.
    """
    rng = np.random.default_rng(num_tasks)
    edges = []
    for v in range(width, num_tasks):
        above = v - v % width - width
        others = above + rng.choice(width, int(rng.integers(0, 3)), replace=False)
        for u in sorted({v - width, *others.tolist()}):
            edges.append((u, v, float(rng.lognormal())))
    return dj.from_edge_delays(rng.lognormal(size=num_tasks), edges, num_devices)
