"""Draws the figures of README and docs: `python -m experiments.figures`, into docs/figures/."""

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import tyro

import doppler_jax as dj
from doppler_jax.costs.random_clusters import ClusterKind, costs_of_ccr, random_cluster
from doppler_jax.graphs.families import make_family
from doppler_jax.objective import LINKS
from doppler_jax.reports.gantt import draw_gantt
from doppler_jax.simulator.critical_chain import critical_chain
from doppler_jax.simulator.oracle import simulate_oracle
from doppler_jax.types import Schedule

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "figures"

EVALUATIONS = 20_000
"""Plans that each search of a figure may simulate."""

Panels = Sequence[tuple[str, Schedule, Sequence[str]]]


def draw_plan() -> tuple[Panels, int]:
    """Returns the best placement found under `fifo`, and the best plan, of one random graph.

    Task 10 is long, and is ready at 0. Under `fifo` it therefore goes before what becomes
    ready later and is more urgent; the plan makes it wait.
    """
    graph = make_family("random_dag", np.random.default_rng(2), 16)
    cluster = random_cluster(np.random.default_rng(0), ClusterKind(2))
    costs = costs_of_ccr(graph, cluster, 0.5)
    found = {
        title: dj.place(graph, costs, method="lns", queue=queue, max_evaluations=EVALUATIONS)
        for title, queue in (("fifo placement", "fifo"), ("plan", "in_order"))
    }
    chain = critical_chain(graph, found["plan"].schedule)
    urgent = {link.item for link in chain if link.kind == "task"}
    names = [f"{'urgent' if v in urgent else 'task'} {v}" for v in range(graph.num_tasks)]
    return [(title, placed.schedule, names) for title, placed in found.items()], 2


def draw_links() -> tuple[Panels, int]:
    """Returns one placement under each kind of links: three tensors go to device 2."""
    edges = [(0, 3, 2.0), (1, 4, 2.0), (2, 5, 2.0)]
    graph, costs = dj.from_edge_delays([1.0, 1.0, 1.0, 0.5, 0.5, 0.5], edges, num_devices=3)
    names = ["makes 0", "makes 1", "makes 2", "reads 0", "reads 1", "reads 2"]
    return [
        (links, simulate_oracle(graph, costs, [0, 0, 1, 2, 2, 2], links=links), names)
        for links in LINKS
    ], 3


FIGURES: dict[str, Callable[[], tuple[Panels, int]]] = {
    "plan.svg": draw_plan,
    "links.svg": draw_links,
}


def main(folder: pathlib.Path = FOLDER) -> None:
    """Writes all figures into a folder."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "doppler_jax"}):  # else every run names parts anew
        for name, draw in FIGURES.items():
            panels, num_devices = draw()
            figure = draw_gantt(panels, num_devices)
            figure.savefig(folder / name, metadata={"Date": None})


if __name__ == "__main__":
    tyro.cli(main)
