"""The command line: `python -m doppler_jax COMMAND`, installed as `doppler`.

`place` plans, and `compare` and `report` show what it wrote; `calibrate` measures this machine,
`train` trains, `list` names what there is.
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import numpy as np
import tyro

# Not by the public door, which loads JAX: that takes longer than many a plan.
from doppler_jax import cli
from doppler_jax.costs.build import make_costs
from doppler_jax.costs.clusters import find_cluster, list_clusters
from doppler_jax.costs.pins import pin
from doppler_jax.files import parse_json_object, read_text
from doppler_jax.graphs.formats import load_graph
from doppler_jax.methods.registry import DEFAULT_METHOD, find_method, is_ours, list_methods
from doppler_jax.objective import Objective
from doppler_jax.placed import Placed, load_placed
from doppler_jax.placing import place as find_plan
from doppler_jax.reports.compare import compare as find_difference
from doppler_jax.reports.gantt import plot_gantt
from doppler_jax.reports.tables import format_seconds, print_table

ENDING_S = 0.1
"""Seconds of a bound that are left for judging and writing."""

MOST_SHOWN = 300
"""Tasks whose placement and order are printed."""

EXAMPLES = """Learned placement of task graphs on devices.

examples:
  doppler place graph.json --cluster p100x4 --budget-s 10 --report plan.html
  doppler place graph.json --method heft annealing doppler+search --output plan.json
  doppler compare other.json plan.json
  doppler report plan.json page.html
  doppler train stage1 --workload ffnn --cluster p100x4
  doppler --tyro-print-completion bash    (or zsh, tcsh: for the shell to complete words)

It exits with 0; with 2 where something given is wrong; with 130 after Ctrl-C, but
for the search of `place`, which ends with the best plan until then."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Place the tasks of a graph file on the devices of a cluster."""

    graph: tyro.conf.Positional[pathlib.Path]
    """Task graph: DOPPLER text or this project's JSON."""
    cluster: str = "reference_x4"
    """Name of a preset (see `list`), or a cluster's JSON file."""
    method: tuple[str, ...] = (DEFAULT_METHOD,)
    """Placement methods (see `list`), or functions of yours, `module:function`. Of several the
    best plan is kept and shown."""
    policy: pathlib.Path | None = None
    """Checkpoint or run folder of a trained policy, for methods that learn; doppler+search
    otherwise takes the one that ships."""
    budget_s: float | None = None
    """Seconds until the command ends, from its start on, shared by the methods (if nothing
    bounds it, it searches 5 to 10, and trains 60)."""
    max_evaluations: int | None = None
    """Executions that may be simulated."""
    objective: Annotated[Objective, tyro.conf.arg(name="")] = Objective()  # noqa: RUF009
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
    """Write the plan here as JSON, for `compare`, `report` and `dj.load_placed`; must not
    exist."""
    report: pathlib.Path | None = None
    """Write a page here that shows the plan in a browser; replaces an old one."""
    gantt: pathlib.Path | None = None
    """Draw the timeline here, a PNG; replaces an old one."""
    explain: bool = False
    """Print what the makespan went on."""
    json: bool = False
    """Print one JSON object, and nothing else."""


@dataclasses.dataclass(frozen=True)
class Compare:
    """Say what differs between two plans that `place` wrote, and why one is faster."""

    first: tyro.conf.Positional[pathlib.Path]
    second: tyro.conf.Positional[pathlib.Path]
    graph: pathlib.Path | None = None
    """Their task graph, if it is not where it was."""
    cluster: str | None = None
    """Their cluster, if its file is not where it was."""
    report: pathlib.Path | None = None
    """Write a page here that shows both; replaces an old one."""
    json: bool = False
    """Print one JSON object, and nothing else."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Write a page that shows a plan that `place` wrote, and opens offline."""

    plan: tyro.conf.Positional[pathlib.Path]
    page: tyro.conf.Positional[pathlib.Path]
    """The HTML file; replaces an old one."""
    graph: pathlib.Path | None = None
    """Its task graph, if it is not where it was."""
    cluster: str | None = None
    """Its cluster, if its file is not where it was."""


@dataclasses.dataclass(frozen=True)
class List:
    """List the known methods, clusters and workloads."""

    json: bool = False
    """Print one JSON object, and nothing else."""


def main(command: Any) -> None:
    """Does what was asked for, by one of `commands`."""
    match command:
        case Place():
            place(command)
        case Compare():
            compare(command)
        case Report():
            read_plan(command.plan, command.graph, command.cluster).report(
                command.page, title=command.plan.name
            )
        case List():
            list_names(command)
        case _:
            work(command)


def commands(words: Sequence[str]) -> Any:
    """Returns the types of the commands; those that load slowly only if they may be needed."""
    quick = Place | Compare | Report | List
    if words[:1] in (["place"], ["compare"], ["report"], ["list"]):
        return quick
    from doppler_jax.engine.__main__ import CalibrateSettings
    from doppler_jax.training import pretrain, settings

    def named(name: str, kind: Any) -> Any:
        return Annotated[kind, tyro.conf.subcommand(name)]

    stages = (
        named("stage1", settings.Stage1Settings),
        named("stage2", settings.Stage2Settings),
        named("stage3", settings.Stage3Settings),
        named("pretrain", pretrain.PretrainSettings),
    )
    stage: Any = Annotated[Union[stages], tyro.conf.arg(name="")]  # noqa: UP007
    train = dataclasses.make_dataclass("Train", [("stage", stage)], frozen=True)
    train.__doc__ = "Train a policy by imitation, in simulation, or on this machine."
    return quick | named("calibrate", CalibrateSettings) | named("train", train)


def work(command: Any) -> None:
    """Measures this machine, or trains."""
    from doppler_jax.engine import __main__ as engine
    from doppler_jax.engine.stage3 import stage3
    from doppler_jax.training import pretrain, settings, stages

    match getattr(command, "stage", command):
        case engine.CalibrateSettings() as chosen:
            engine.main(chosen)
        case settings.Stage1Settings() | settings.Stage2Settings() as chosen:
            stages.run_stage(chosen)
        case settings.Stage3Settings() as chosen:
            stage3(chosen)
        case pretrain.PretrainSettings() as chosen:
            pretrain.pretrain(chosen)


def list_names(command: List) -> None:
    """Prints what there is to choose from."""
    from doppler_jax.programs.workloads import list_workloads

    names = {
        "methods": list_methods(),
        "clusters": list_clusters(),
        "workloads": list_workloads(),
    }
    if command.json:
        print(json.dumps(names))
        return
    for what, known in names.items():
        print(f"{what + ':':10}", ", ".join(known))


def place(command: Place) -> None:
    """Places a file's graph, prints what came out and writes what it is asked to."""
    cli.check_seed(command.seed)
    if command.output is not None:
        check_output(command.output)
    for path in (command.report, command.gantt):
        if path is not None:
            check_folder(path)
    for name in command.method:
        find_method(name)  # before a cluster is measured
    if not command.method:
        raise ValueError("--method: expected at least one")
    graph = load_graph(command.graph)
    costs = make_costs(graph, find_cluster(command.cluster))
    policy = None
    if command.policy is not None:
        from doppler_jax.policy_files import load_policy

        policy = load_policy(command.policy)
    plans = []
    for k, name in enumerate(command.method):
        left_s = _seconds_left(command.budget_s)
        placed = find_plan(
            graph,
            costs,
            method=name,
            policy=policy,
            key=command.seed,
            budget_s=left_s and left_s / (len(command.method) - k),
            max_evaluations=command.max_evaluations,
            objective=command.objective,
            queue=command.queue,
            cache=command.cache,
            keep_compiled=command.keep_compiled,
            pin=command.pin,
            together=command.together,
        )
        plans.append(placed)
        if placed.interrupted:
            break
    best = min(plans, key=lambda plan: plan.objective_s)
    source = {"graph": str(command.graph), "cluster": command.cluster}
    if command.pin:
        source["pin"] = json.dumps(command.pin)
    if command.output is not None:
        best.save(command.output, source)
    if command.report is not None:
        best.report(command.report, title=f"{command.graph.name} on {command.cluster}")
    if command.gantt is not None:
        names = [f"task {v}" for v in range(graph.num_tasks)]
        panels = [(plan.method, plan.schedule, names) for plan in plans]
        plot_gantt(command.gantt, panels, num_devices=costs.num_devices)
    if command.json:
        print(json.dumps({**source, "plans": [_as_json(plan) for plan in plans]}))
        return
    _print_plans(f"{command.graph.name}: {graph.num_tasks} tasks on {command.cluster}", plans)
    if best.interrupted:
        print("stopped: the best placement until then")
    if command.explain:
        print(best.explain())
    elif command.output is None and len(plans) == 1:
        if graph.num_tasks > MOST_SHOWN:
            print("placement and order: --output FILE keeps them")
            return
        print("placement:", *best.placement.tolist())
        print("order:", *np.argsort(best.priority).tolist())


def _print_plans(title: str, plans: Sequence[Placed]) -> None:
    rows = [
        (
            plan.method,
            format_seconds(plan.makespan_s),
            *([] if plan.period_s is None else [format_seconds(plan.period_s)]),
            format_seconds(plan.lower_bound_s) + ", met" * plan.proven,
            plan.queue,
            str(plan.evaluations),
            format_seconds(plan.seconds),
        )
        for plan in plans
    ]
    period = [] if plans[0].period_s is None else ["a loop's step"]
    columns = (
        "method", "makespan", *period, "lower bound", "queue", "plans simulated", "search",
    )  # fmt: skip
    print_table(title, columns, rows)


def _as_json(placed: Placed) -> dict[str, Any]:
    names = (
        "method", "makespan_s", "period_s", "objective_s", "lower_bound_s", "proven", "queue",
        "evaluations", "seconds", "interrupted",
    )  # fmt: skip
    arrays = {name: getattr(placed, name).tolist() for name in ("placement", "priority")}
    return {name: getattr(placed, name) for name in names} | arrays


def compare(command: Compare) -> None:
    """Prints what two files' plans differ in, and writes a page if it is asked to."""
    if command.report is not None:
        check_folder(command.report)
    first, second = (
        read_plan(path, command.graph, command.cluster)
        for path in (command.first, command.second)
    )
    found = find_difference(first, second)
    if command.report is not None:
        found.report(command.report, title=f"{command.first.name} and {command.second.name}")
    if command.json:
        arrays = {name: getattr(found, name) for name in ("renamed", "moved", "reordered")}
        spent = [
            {"makespan_s": one.makespan_s, **dataclasses.asdict(one.chain_seconds)}
            for one in found.explained
        ]
        lists = {name: array.tolist() for name, array in arrays.items()}
        print(json.dumps({"first": spent[0], "second": spent[1], **lists}))
    else:
        print(found)


def read_plan(path: pathlib.Path, graph: pathlib.Path | None, cluster: str | None) -> Placed:
    """Returns the plan that `place --output` wrote, of the graph and cluster that it names."""
    source = parse_json_object(path, read_text(path)).get("source")
    source = source if isinstance(source, dict) else {}
    graph = graph or source.get("graph")
    cluster = cluster or source.get("cluster")
    for name, value in (("graph", graph), ("cluster", cluster)):
        if not value:
            raise ValueError(f"{path}: does not say its {name}; give it by --{name}")
    tasks = load_graph(str(graph))
    costs = make_costs(tasks, find_cluster(str(cluster)))
    pins = parse_json_object(path, source.get("pin", "{}"))
    return load_placed(path, tasks, pin(tasks, costs, pins) if pins else costs)


def _seconds_left(budget_s: float | None) -> float | None:
    """Returns what is left of the seconds that the whole command may take, of valid bounds."""
    if budget_s is None or not budget_s > 0:
        return budget_s
    return max(budget_s - cli.process_age_s() - ENDING_S, 1e-3)


def check_output(path: pathlib.Path) -> None:
    """Raises `ValueError` unless a file can be made there, before anything is computed."""
    if path.exists():
        raise ValueError(f"{path}: exists already; nothing was overwritten")
    check_folder(path)


def check_folder(path: pathlib.Path) -> None:
    """Raises `ValueError` unless there is a folder to write a file to."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{path}: {what}")


def main_of_process(command: Any) -> None:
    """Does what was asked for, as all that this process is for."""
    main(command)
    sys.stdout.flush()
    if isinstance(command, Place) and all(map(is_ours, command.method)):
        sys.stderr.flush()
        os._exit(0)  # to take down what is loaded would take 0.4 s


def script() -> None:
    """Is the command `doppler`."""
    cli.run(main_of_process, commands(sys.argv[1:]), EXAMPLES, prog="doppler")


if __name__ == "__main__":
    script()
