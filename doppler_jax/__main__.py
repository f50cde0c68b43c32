"""The command line: `python -m doppler_jax place GRAPH ...`, `stage1` to `stage3`, `pretrain`.

`list` names methods, clusters and workloads.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import numpy as np
import tyro

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.problems import find_cluster
from doppler_jax.reports.tables import format_seconds, print_table

ENDING_S = 0.3
"""Seconds of a bound that are left for judging, writing and leaving."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Place the tasks of a graph file on the devices of a cluster."""

    graph: tyro.conf.Positional[pathlib.Path]
    """Task graph: DOPPLER text or this project's JSON."""
    cluster: str = "reference_x4"
    """Name of a preset (see `list`), or a cluster's JSON file."""
    method: str = dj.methods.DEFAULT_METHOD
    """Placement method (see `list`)."""
    policy: pathlib.Path | None = None
    """Checkpoint or run folder of a trained policy, for methods that learn; doppler+search
    otherwise takes the one that ships."""
    budget_s: float | None = None
    """Seconds until the command ends, from its start on (if nothing bounds it, it searches 5
    to 10, and trains 60)."""
    max_evaluations: int | None = None
    """Executions that may be simulated."""
    objective: Annotated[dj.Objective, tyro.conf.arg(name="")] = dj.Objective()  # noqa: RUF009
    """What is minimised."""
    queue: str | None = None
    """What devices take next: `fifo`, what is ready first, or what the plan says: `in_order`,
    waiting for it, or `priority`, of what is ready. By default `in_order`, and under noise the
    better of these two."""
    cache: pathlib.Path | None = None
    """Folder of placements found before: one for the same request is not searched for again."""
    keep_compiled: bool = True
    """Keep what JAX compiles in the user's cache folder."""
    pin: dict[str, int] = dataclasses.field(default_factory=dict)
    """Devices of tasks, by patterns of their ids: `--pin 0 1 '2?' 3`."""
    together: tuple[str, ...] = ()
    """Patterns of the ids of tasks, each of some that share a device."""
    seed: int = 0
    output: pathlib.Path | None = None
    """Write the placement here as JSON, for `dj.load_placed`; must not exist."""


@dataclasses.dataclass(frozen=True)
class List:
    """List the known methods, clusters and workloads."""


def main(command: Any) -> None:
    """Does what was asked for, by one of `commands`."""
    match command:
        case Place():
            place(command)
        case List():
            print("methods:  ", ", ".join(dj.list_methods()))
            print("clusters: ", ", ".join(dj.list_clusters()))
            print("workloads:", ", ".join(dj.list_workloads()))
        case _:
            train(command)


def commands(words: Sequence[str]) -> Any:
    """Returns the types of the commands; those that train, which load slowly, if asked for."""
    if words[:1] in (["place"], ["list"]):
        return Place | List
    from doppler_jax.training import pretrain, settings

    trains = {
        "stage1": settings.Stage1Settings,
        "stage2": settings.Stage2Settings,
        "stage3": settings.Stage3Settings,
        "pretrain": pretrain.PretrainSettings,
    }
    named = (Annotated[kind, tyro.conf.subcommand(name)] for name, kind in trains.items())
    return Union[Place, List, *named]


def train(command: Any) -> None:
    """Does a command that trains."""
    from doppler_jax.training import pretrain, settings, stages

    match command:
        case settings.Stage1Settings() | settings.Stage2Settings():
            stages.run_stage(command)
        case settings.Stage3Settings():
            # The engine is loaded for what measures alone.
            from doppler_jax.engine.stage3 import stage3

            stage3(command)
        case pretrain.PretrainSettings():
            pretrain.pretrain(command)


def place(command: Place) -> None:
    """Places a file's graph, prints what came out and writes it if asked to."""
    cli.check_seed(command.seed)
    if command.output is not None:
        check_output(command.output)
    dj.methods.find_method(command.method)  # before a cluster is measured
    graph = dj.load_graph(command.graph)
    cluster = find_cluster(command.cluster)
    costs = dj.make_costs(graph, cluster)
    policy = None if command.policy is None else dj.load_policy(command.policy)
    placed = dj.place(
        graph,
        costs,
        method=command.method,
        policy=policy,
        key=command.seed,
        budget_s=_seconds_left(command.budget_s),
        max_evaluations=command.max_evaluations,
        objective=command.objective,
        queue=command.queue,
        cache=command.cache,
        keep_compiled=command.keep_compiled,
        pin=command.pin,
        together=command.together,
    )
    if command.output is not None:
        source = {"graph": str(command.graph), "cluster": command.cluster}
        placed.save(command.output, source)
    print_table(
        f"{command.graph.name}: {graph.num_tasks} tasks on {command.cluster}",
        ("method", "makespan", "lower bound", "queue", "plans simulated", "search"),
        [
            (
                placed.method,
                format_seconds(placed.makespan_s),
                format_seconds(placed.lower_bound_s) + ", met" * placed.proven,
                placed.queue,
                str(placed.evaluations),
                format_seconds(placed.seconds),
            )
        ],
    )
    if placed.interrupted:
        print("stopped: the best placement until then")
    if command.output is None:
        print("placement:", *placed.placement.tolist())
        print("order:", *np.argsort(placed.priority).tolist())


def _seconds_left(budget_s: float | None) -> float | None:
    """Returns what is left of the seconds that the whole command may take, of valid bounds."""
    if budget_s is None or not budget_s > 0:
        return budget_s
    return max(budget_s - cli.process_age_s() - ENDING_S, 1e-3)


def check_output(path: pathlib.Path) -> None:
    """Raises `ValueError` unless a file can be made there, before anything is computed."""
    if path.exists():
        raise ValueError(f"{path}: exists already; nothing was overwritten")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


if __name__ == "__main__":
    cli.run(main, commands(sys.argv[1:]), "Learned placement of task graphs on devices.")
