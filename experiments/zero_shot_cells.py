"""The cells of `experiments.zero_shot`: problems by name, and one method on one of them."""

import dataclasses
import pathlib
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.baselines.heft import heft
from doppler_jax.costs.digests import problem_digest, tree_digest
from doppler_jax.costs.random_clusters import ClusterKind, costs_of_ccr, random_cluster
from doppler_jax.graphs.families import HELD_OUT, make_family
from doppler_jax.graphs.padded import Sizes
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.stacking import pad_problem, problem_sizes
from doppler_jax.training.checkpoint import Policy
from experiments.cells import Cells
from experiments.method_cells import finished, placed_record

SIZES = (48, 96, 180, 240)
"""Tasks of the held-out graphs, about."""

CLUSTERS = (
    ClusterKind(4),
    ClusterKind(4, is_unequal=True),
    ClusterKind(8, num_islands=2),
    ClusterKind(8, is_unequal=True, num_islands=2),
)
"""Clusters that they are placed on, in turn."""

ISLANDS = ClusterKind(8, is_unequal=True, num_islands=2)
"""The clusters of the part `clusters`."""

ISLAND_FAMILIES = (
    "cholesky", "fork_join", "layered", "lu", "series_parallel", "tensor_program",
)  # fmt: skip
"""The graphs placed on them, in turn."""

SAMPLES = 64
"""Placements drawn there, beside the greedy ones."""

CCR = (0.1, 10.0)

GREEDY = {"greedy": 1, "two greedy": 2}
"""Placements of the policy without drawing: in SEL's order; the better of both orders."""

WARM_UP_EVALUATIONS = 10_000
"""Of the run before the clock starts: enough that no method shrinks its batches."""


@dataclasses.dataclass(frozen=True)
class Study:
    """What all cells of a study share."""

    cells: Cells
    policy: Policy
    reference: pathlib.Path

    @property
    def policy_terms(self) -> dict[str, Any]:
        config = dataclasses.asdict(self.policy.config)
        return {"policy": config, "parameters": tree_digest(self.policy.params)}


@dataclasses.dataclass(frozen=True)
class Run:
    """A method and what it may spend; None is no bound."""

    method: str
    evaluations: int | None = None
    seconds: int | None = None

    @property
    def label(self) -> str:
        if self.seconds is not None:
            return f"{self.method}, {self.seconds} s"
        return f"{self.method}, {self.evaluations:,}" if self.evaluations else self.method

    @property
    def uses_policy(self) -> bool:
        return self.method in (*GREEDY, "doppler", "doppler+search")


def load_problem(reference: pathlib.Path, name: str) -> tuple[dj.TaskGraph, dj.Costs]:
    """Returns a problem by name: a published graph on 4 devices, or `FAMILY-NUMBER`."""
    if (reference / f"{name}.txt").exists():
        graph = dj.load_graph(reference / f"{name}.txt")
        return graph, dj.reference_costs(graph, num_devices=4)
    family, number = name.rsplit("-", 1)
    return _held_out(family, int(number))


def cluster_name(number: int) -> str:
    """Returns what a held-out graph of a number is placed on, for people to read."""
    kind = _cluster_kind(number)
    speeds = "unequal" if kind.is_unequal else "equal"
    islands = f" in {kind.num_islands} islands" if kind.num_islands > 1 else ""
    return f"{kind.num_devices} {speeds}{islands}"


def _cluster_kind(number: int) -> ClusterKind:
    return CLUSTERS[number // len(SIZES) % len(CLUSTERS)]


@cache
def _held_out(family: str, number: int) -> tuple[dj.TaskGraph, dj.Costs]:
    rng = np.random.default_rng([HELD_OUT.index(family), number])
    graph = make_family(family, rng, SIZES[number % len(SIZES)])
    ccr = float(np.exp(rng.uniform(*np.log(CCR))))
    return graph, costs_of_ccr(graph, random_cluster(rng, _cluster_kind(number)), ccr)


def method_cell(study: Study, name: str, run: Run, seed: int) -> dict[str, Any]:
    """Returns what a method makes of a problem; a bound in seconds begins when compiled."""

    def make() -> dict[str, Any]:
        graph, costs = load_problem(study.reference, name)
        policy = study.policy if run.uses_policy else None
        place = partial(dj.place, graph, costs, key=jax.random.key(seed), policy=policy)
        if run.seconds is not None:
            finished(place(method=run.method, max_evaluations=WARM_UP_EVALUATIONS))
        method = "doppler" if run.method in GREEDY else run.method
        bound = GREEDY.get(run.method, run.evaluations)
        placed = place(method=method, max_evaluations=bound, budget_s=run.seconds)
        return placed_record(placed) | {"problem": problem_digest(graph, costs)}

    terms = {"evaluations": run.evaluations, "seconds": run.seconds}
    terms |= study.policy_terms if run.uses_policy else {}
    label = run.label.replace("+", "_").replace(", ", "-").replace(" ", "").replace(",", "")
    return study.cells.get(f"{name}-{label}-{seed}", terms, make)


def island_cell(study: Study, count: int) -> dict[str, Any]:
    """Returns makespans `[count]` of the policy and of HEFT on clusters in two islands.

    Of the policy: its greedy placement's in SEL's order, the lesser of it and the one in the
    order of b-levels, and the least of these and `SAMPLES` samples'. All families in turn, so
    some are of the kind that the base policy was trained on; the clusters are drawn afresh.
    """

    def make() -> dict[str, Any]:
        problems = [_island_problem(number) for number in range(count)]
        drawn = drawn_placements(study.policy, [make_policy_inputs(*p) for p in problems])
        makespans = [
            [_makespan_s(*p, x) for x in placements]
            for p, placements in zip(problems, drawn, strict=True)
        ]
        return {
            "greedy_s": [found[0] for found in makespans],
            "two_greedy_s": [min(found[:2]) for found in makespans],
            "best_s": [min(found) for found in makespans],
            "heft_s": [_makespan_s(*p, heft(*p)) for p in problems],
            "families": [_family(number) for number in range(count)],
        }

    return study.cells.get(
        "islands", study.policy_terms | {"count": count, "samples": SAMPLES}, make
    )


def _island_problem(number: int) -> tuple[dj.TaskGraph, dj.Costs]:
    rng = np.random.default_rng([77, number])
    num_tasks = int(np.exp(rng.uniform(*np.log((30, 300)))))
    graph = make_family(_family(number), rng, num_tasks)
    ccr = float(np.exp(rng.uniform(*np.log(CCR))))
    return graph, costs_of_ccr(graph, random_cluster(rng, ISLANDS), ccr)


def _family(number: int) -> str:
    return ISLAND_FAMILIES[number % len(ISLAND_FAMILIES)]


def _makespan_s(graph: dj.TaskGraph, costs: dj.Costs, placement: np.ndarray) -> float:
    return dj.makespan_s(dj.simulate_oracle(graph, costs, placement))


def drawn_placements(policy: Policy, problems: Sequence[PolicyInputs]) -> list[np.ndarray]:
    """Returns placements `[2 + SAMPLES, N]` of each problem, the first two greedy.

    They share one compilation.
    """
    sizes = [dataclasses.astuple(problem_sizes(problem)) for problem in problems]
    common = Sizes(*map(max, zip(*sizes, strict=True)))
    return [
        policy_candidates(pad_problem(problem, common), policy, jax.random.key(k), 2 + SAMPLES)
        for k, problem in enumerate(problems)
    ]
