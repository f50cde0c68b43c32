"""How good is the base policy where it was never trained? `python -m experiments.zero_shot`.

- Held-out families and the published graphs: the policy's greedy placements and samples, a
  search from them, and rivals, as ratios to the best makespan known: the least of all runs,
  those at `--reference-evaluations` included, and of experiments/best_placements.json.
- Against HEFT on generated clusters of 8 unequal devices in two islands.
- How long a placement takes: the cold call, then warm ones.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from functools import cache, partial

import numpy as np

import doppler_jax as dj
from doppler_jax.costs.digests import tree_digest
from doppler_jax.graphs.families import HELD_OUT
from doppler_jax.policy_files import load_base_policy
from doppler_jax.reports.tables import format_table
from experiments.catalogue import BEST_KNOWN_S, held_out_cluster, island_family
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import in_turns, seconds_of, warm
from experiments.methods import Spend, cold, method_cells
from experiments.tables import by, table

GREEDY = {1: "greedy", 2: "two greedy", 66: "best of 64 samples"}
"""What a policy gives by its number of placements: greedy in SEL's order, in that of b-levels
too, and samples besides."""

LISTED = ("critical_path", "heft")

SEARCHES = ("doppler+search", "annealing", "local_search")

REFERENCES = ("doppler+search", "evolution", "annealing", "local_search")
"""The best of these at `--reference-evaluations` counts as known."""

TIMED = ("full_transformer_layer_261nodes", "layers-10000")


@dataclasses.dataclass(frozen=True)
class ZeroShotSettings(Settings):
    """What to measure."""

    policy: pathlib.Path | None = None
    """Checkpoint or run folder of the policy; by default the base policy that ships."""
    published: tuple[str, ...] = tuple(BEST_KNOWN_S)
    instances: int = 16
    """Graphs of each held-out family."""
    clusters: int = 200
    """Instances against HEFT."""
    timed: tuple[str, ...] = TIMED
    """Problems whose placing is timed."""
    evaluations: tuple[int, ...] = (1000, 10_000)
    seconds: tuple[float, ...] = (5.0,)
    """Budgets of searches, in seconds of a cold call."""
    reference_evaluations: int = 1_000_000
    """Of each method that seeks the best known placement."""


@cache
def read_policy(path: pathlib.Path | None) -> dj.Policy:
    """Returns the policy.

    Raises:
      ValueError: none was given, and none ships.
    """
    policy = load_base_policy() if path is None else dj.load_policy(path)
    if policy is None:
        raise ValueError("no base policy ships with this installation; give --policy")
    return policy


def cells(context: Context[ZeroShotSettings]) -> list[Cell]:
    """Returns the cells of all methods; those that use the policy have its digest."""
    asked = context.settings
    policy = read_policy(asked.policy)
    digest = tree_digest(policy.params)
    held_out = [f"{family}-{k}" for family in HELD_OUT for k in range(asked.instances)]
    islands = [f"islands-{k}" for k in range(asked.clusters)]
    problems = [*asked.published, *held_out]
    searches = [Spend(evaluations=n) for n in asked.evaluations]
    searches += [Spend(seconds=s) for s in asked.seconds]
    most = [Spend(evaluations=asked.reference_evaluations)]
    run = partial(method_cells, context)
    own = partial(run, policy=policy, digest=digest)
    found = run([*problems, *islands], LISTED, [Spend()])
    found += own([*problems, *islands], ["doppler"], [Spend(evaluations=n) for n in GREEDY])
    for methods, spends in ((SEARCHES, searches), (REFERENCES, most)):
        for method in methods:
            found += (own if method == "doppler+search" else run)(problems, [method], spends)
    return found + [
        Cell({"timed": name, "digest": digest}, partial(time_placing, context, name))
        for name in asked.timed
    ]


def time_placing(context: Context[ZeroShotSettings], name: str) -> Record:
    """Returns seconds of placing a graph by the policy's two greedy placements."""
    problem, policy = context.problem(name), read_policy(context.settings.policy)
    place = partial(
        dj.place, problem.graph, problem.costs, method="doppler", policy=policy,
        max_evaluations=2,
    )  # fmt: skip
    with cold():
        seconds = in_turns({"place": lambda: seconds_of(lambda: place().placement)}, 5)["place"]
    return {"tasks": problem.graph.num_tasks, "cold_s": seconds[0], "warm_s": warm(seconds)}


def report(context: Context[ZeroShotSettings], records: list[Record]) -> Page:
    """Returns ratios to the best known and to HEFT, and the times."""
    published = context.settings.published
    makespans = {  # by problem and label
        name: {_label(r): r["makespan_s"] for r in found if "makespan_s" in r}
        for name, found in by(records, "problem").items()
        if name is not None
    }
    islands = {n: found for n, found in makespans.items() if n.startswith("islands-")}
    ratios, groups = {}, {}
    for name in (n for n in makespans if n not in islands):
        known_s = context.problem(name).best_known_s or np.inf
        best_s = min([known_s, *makespans[name].values()])
        ratios[name] = {label: s / best_s for label, s in makespans[name].items()}
        if name in published:
            groups[name] = [name]
            continue
        family, number = name.rsplit("-", 1)
        for group in (family, held_out_cluster(int(number)), "held out"):
            groups.setdefault(group, []).append(name)
    timed = [
        {"problem": r["timed"], "tasks": r["tasks"], "first call, cold_s": r["cold_s"]}
        | {"further calls, warm_s": r["warm_s"]}
        for r in records
        if "timed" in r
    ]
    parts = (
        (groups, "Makespan over the best known, mean (worst); seconds are of a cold call.",
         partial(_ratio_table, groups, ratios)),
        (islands, "Makespans over HEFT's, 8 devices of unequal speed in two islands.",
         partial(_heft_table, islands)),
        (timed, "Seconds of `dj.place`, two greedy.", partial(table, timed)),
    )  # fmt: skip
    return Page("\n".join(f"{text}\n\n{make()}" for what, text, make in parts if what))


def _label(record: Record) -> str:
    if record["method"] == "doppler":
        return GREEDY[record["evaluations"]]
    return ", ".join(filter(None, (record["method"], record["budget"])))


def _ratio_table(
    groups: Mapping[str, Sequence[str]], ratios: Mapping[str, Mapping[str, float]]
) -> str:
    labels = dict.fromkeys(
        label for names in groups.values() for n in names for label in ratios[n]
    )
    rows = []
    for label in labels:
        row = [label]
        for names in groups.values():
            found = np.array([ratios[n][label] for n in names if label in ratios[n]])
            worst = f" ({found.max():.4f})" if len(names) > 1 and len(found) else ""
            row.append(f"{found.mean():.4f}{worst}" if len(found) else "-")
        rows.append(row)
    heads = [n if names == [n] else f"{n} ({len(names)})" for n, names in groups.items()]
    return format_table(("method", *heads), rows)


def _heft_table(islands: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    families = {name: island_family(int(name.rsplit("-", 1)[1])) for name in islands}
    for family in ("all", *sorted(set(families.values()))):
        names = [n for n in islands if family in ("all", families[n]) and "heft" in islands[n]]
        for label in GREEDY.values():
            found = [
                islands[n][label] / islands[n]["heft"] for n in names if label in islands[n]
            ]
            row = {"placement": label, "family": family, "instances": len(found)}
            row |= {"at or below HEFT": f"{np.mean(np.array(found) <= 1 + 1e-9):.0%}"}
            quantiles = {"10%": 0.1, "median": 0.5, "90%": 0.9, "worst": 1.0}
            rows.append(row | {w: float(np.quantile(found, q)) for w, q in quantiles.items()})
    return table(rows)


QUICK = {
    "instances": 2, "clusters": 12, "reference_evaluations": 50_000,
}  # fmt: skip

STUDY = Study("zero_shot", ZeroShotSettings(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
