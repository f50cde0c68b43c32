"""How good is the base policy where it was never trained? `python -m experiments.zero_shot`.

- Held-out families and the published graphs: the policy's greedy placements and samples, a
  search from them, and rivals, as ratios to the best makespan known: the least of all runs,
  those at `--reference-evaluations` included, and of experiments/best_placements.json.
- Against HEFT on generated clusters of 8 unequal devices in two islands.

`scaling` says how long such a placement takes.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from functools import partial

import numpy as np

import doppler_jax as dj
from doppler_jax.costs.digests import tree_digest
from doppler_jax.graphs.families import HELD_OUT
from doppler_jax.policy_files import load_base_policy
from experiments.catalogue import PUBLISHED, held_out_cluster, island_family
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.methods import Spend, method_cells
from experiments.tables import by, means_table, table

GREEDY = {1: "greedy", 2: "two greedy", 66: "best of 64 samples"}
"""What a policy gives by its number of placements: greedy in SEL's order, in that of b-levels
too, and samples besides."""

LISTED = ("critical_path", "heft")

SEARCHES = ("doppler+search", "lns", "annealing")
"""At `--reference-evaluations` the best of them counts as known."""


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What to measure."""

    policy: pathlib.Path | None = None
    """Checkpoint or run folder of the policy; by default the base policy that ships."""
    published: tuple[str, ...] = PUBLISHED
    instances: int = 16
    """Graphs of each held-out family."""
    clusters: int = 200
    """Instances against HEFT."""
    evaluations: tuple[int, ...] = (1000, 10_000)
    seconds: tuple[float, ...] = (5.0,)
    """Budgets of searches, in seconds of a cold call."""
    reference_evaluations: int = 1_000_000
    """Of each method that seeks the best known placement."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns the cells of all methods; those that use the policy have its digest."""
    asked = context.settings
    policy = load_base_policy() if asked.policy is None else dj.load_policy(asked.policy)
    if policy is None:
        raise ValueError("no base policy ships with this installation; give --policy")
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
    for methods, spends in ((SEARCHES, searches), (SEARCHES, most)):
        for method in methods:
            found += (own if method == "doppler+search" else run)(problems, [method], spends)
    return found


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns ratios to the best known and to HEFT, and the times."""
    over_best, over_heft = [], []
    for name, found in by([r for r in records if "makespan_s" in r], "problem").items():
        family, _, number = name.rpartition("-")
        if family == "islands":
            heft_s = [r["makespan_s"] for r in found if r["method"] == "heft"]
            over_heft += [
                {"placement": _label(r), "family": f, "ratio": r["makespan_s"] / heft_s[0]}
                for f in ("all", island_family(int(number)))
                for r in found
                if r["method"] == "doppler" and heft_s
            ]
            continue
        known_s = context.problem(name).best_known_s or np.inf
        best_s = min([known_s, *(r["makespan_s"] for r in found)])
        groups: tuple[str, ...] = (name,)
        if name not in context.settings.published:
            groups = family, held_out_cluster(int(number)), "held out"
        over_best += [
            {"graphs": group, "method": _label(r), "ratio": r["makespan_s"] / best_s}
            for group in groups
            for r in found
        ]
    heft = [
        {"placement": placement, "family": family} | _spread([r["ratio"] for r in found])
        for (family, placement), found in by(over_heft, "family", "placement").items()
    ]
    best = means_table(over_best, ("graphs",), value="ratio", show=_mean_worst)
    texts = {"Makespan over the best known, mean (worst)": best}
    return Page(texts | {"Makespan over HEFT's": table(heft)})


def _label(record: Record) -> str:
    if record["method"] == "doppler":
        return GREEDY[record["evaluations"]]
    return ", ".join(filter(None, (record["method"], record["budget"])))


def _mean_worst(ratios: np.ndarray) -> str:
    return f"{ratios.mean():.4f}" + (f" ({ratios.max():.4f})" if len(ratios) > 1 else "")


def _spread(ratios: Sequence[float]) -> Record:
    """Returns how ratios to HEFT are spread."""
    below = f"{np.mean(np.array(ratios) <= 1 + 1e-9):.0%}"
    quantiles = {"10%": 0.1, "median": 0.5, "90%": 0.9, "worst": 1.0}
    found = {name: float(np.quantile(ratios, q)) for name, q in quantiles.items()}
    return {"instances": len(ratios), "at or below HEFT": below, **found}


QUICK = {"instances": 2, "clusters": 12, "reference_evaluations": 50_000}

STUDY = Study("zero_shot", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
