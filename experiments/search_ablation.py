"""What each part of stage 2 is worth: `python -m experiments.search_ablation`.

Stages 1 and 2 from scratch on the published 4-device graphs, with one part changed at a time,
at equal simulated executions or at equal seconds (compilation included). Every makespan is
the float64 oracle's. Each run is kept under runs/search_ablation/cells/ and not repeated;
the table shows all runs asked for.
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.learned import policy_candidates, state_candidates, training_config
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.reports.tables import format_table
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.checkpoint import Policy
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.train import train_policy
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.problems import use_host_devices
from experiments.provenance import provenance
from experiments.search import BEST_KNOWN_S
from experiments.search_cells import load_problem

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "features: without positions": ({"features": "coparent"}, {}),
    "features: the paper's": ({"features": "paper"}, {}),
    "no elites": ({}, {"num_elites": 0}),
    "no local search": ({}, {"num_chains": 0}),
    "neither": ({}, {"num_elites": 0, "num_chains": 0}),
    "all local search": ({}, {"num_chains": SimConfig().num_chains}),
    "batch 64": ({}, {"batch": 64, "minibatches": 2}),
    "batch 1024": ({}, {"batch": 1024, "minibatches": 32}),
}
"""Changes of policy and training by name; minibatches of other batches are of the same size."""


@dataclasses.dataclass(frozen=True)
class AblationSettings:
    """What to run."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    graphs: tuple[str, ...] = tuple(BEST_KNOWN_S)
    seeds: int = 3
    evaluations: int | None = 100_000
    """Simulated executions of a run."""
    budget_s: float | None = None
    """Seconds of a run, in place of simulated executions."""
    quick: bool = False
    """One small run of every variant on one graph, to see that all of it works."""
    host_devices: int = 2
    """Devices that the CPU is split into, where there is no accelerator."""
    reference: pathlib.Path = pathlib.Path("../shared/reference_graphs")
    """Folder with the published graphs."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to search_ablation/ in there."""


def main(settings: AblationSettings) -> None:
    """Runs what is missing, prints and writes the table.

    Raises:
      ValueError: an option names a variant or a graph that does not exist.
    """
    check_settings(settings)
    for option, chosen, known in (
        ("--variants", settings.variants, VARIANTS),
        ("--graphs", settings.graphs, BEST_KNOWN_S),
    ):
        for name in chosen:
            if name not in known:
                raise ValueError(f"{option}: unknown {name!r}; known: {', '.join(known)}")
    use_host_devices(settings.host_devices)
    if settings.quick:
        settings = dataclasses.replace(
            settings, graphs=settings.graphs[:1], seeds=1, evaluations=10_000, budget_s=None
        )
    folder = settings.runs / "search_ablation"
    cells = Cells(folder / "cells")
    settings = dataclasses.replace(settings, variants=tuple(resolve(settings)))
    results = [
        ablation_cell(cells, settings, graph, variant, seed)
        for graph in settings.graphs
        for seed in range(settings.seeds)
        for variant in settings.variants
    ]
    text = tabulate(results, settings)
    print(text)
    write_json_atomic(
        folder / "search_ablation.json", {"provenance": provenance(), "results": results}
    )
    (folder / "search_ablation.md").write_text(text, encoding="utf-8")


def resolve(settings: AblationSettings) -> dict[str, tuple[PolicyConfig, SimConfig]]:
    """Returns the settings of the variants asked for, but for those that repeat another.

    What is changed is what `doppler` does under the bound at hand: within few simulated
    executions it has no local search to be taken away.
    """
    bound = settings.evaluations if settings.budget_s is None else None
    base = training_config("parallel", bound)
    resolved: dict[str, tuple[PolicyConfig, SimConfig]] = {}
    for name in settings.variants:
        of_policy, of_training = VARIANTS[name]
        config = dataclasses.replace(base, **of_training)
        config = dataclasses.replace(config, num_chains=min(config.num_chains, config.batch))
        pair = PolicyConfig(**of_policy), config
        if pair not in resolved.values():
            resolved[name] = pair
    return resolved


def ablation_cell(
    cells: Cells, settings: AblationSettings, graph_name: str, variant: str, seed: int
) -> dict[str, Any]:
    """Returns what stages 1 and 2 make of a graph in one variant."""
    policy_config, config = resolve(settings)[variant]
    bounds: dict[str, Any] = {"max_evaluations": settings.evaluations}
    if settings.budget_s is not None:
        bounds = {"budget_s": settings.budget_s}

    def make() -> dict[str, Any]:
        graph, costs = load_problem(settings.reference, graph_name)
        problem = make_policy_inputs(graph, costs)
        if settings.budget_s is not None:
            jax.clear_caches()  # every run's seconds hold its compilation
        began = time.monotonic()
        trained = train_policy(
            problem, jax.random.key(seed), policy=policy_config, simulate=config, **bounds
        )
        seconds = time.monotonic() - began
        found = state_candidates(trained.state, graph.num_tasks)
        placement, schedule = best_placement(graph, costs, found)
        policy = Policy(params=jax.device_get(trained.state.params), config=policy_config)
        greedy = policy_candidates(problem, policy, jax.random.key(seed), 1)[0]
        return {
            "graph": graph_name,
            "variant": variant,
            "makespan_s": dj.makespan_s(schedule),
            "greedy_s": dj.makespan_s(dj.simulate_oracle(graph, costs, greedy)),
            "seconds": seconds,
            "evaluations": int(trained.state.evaluations),
            "placement": placement.tolist(),
        }

    terms = {
        **bounds,
        "policy": dataclasses.asdict(policy_config),
        "training": dataclasses.asdict(config),
    }
    words = "".join(c if c.isalnum() else "_" for c in variant)
    bound = "-".join(f"{k}_{v}" for k, v in bounds.items())
    return cells.get(f"{graph_name}-{words}-{bound}-{seed}", terms, make)


def tabulate(results: list[dict[str, Any]], settings: AblationSettings) -> str:
    """Returns the table: ratios to the best makespan known, means over the seeds."""
    rows = []
    for graph in settings.graphs:
        for variant in settings.variants:
            runs = [r for r in results if (r["graph"], r["variant"]) == (graph, variant)]
            best = np.array([run["makespan_s"] for run in runs]) / BEST_KNOWN_S[graph]
            greedy = np.array([run["greedy_s"] for run in runs]) / BEST_KNOWN_S[graph]
            rows.append(
                (
                    graph,
                    variant,
                    f"{best.mean():.4f}",
                    f"{best.max():.4f}",
                    f"{greedy.mean():.4f}",
                    f"{np.mean([run['evaluations'] for run in runs]):,.0f}",
                    f"{np.mean([run['seconds'] for run in runs]):.0f}",
                )
            )
    columns = ("graph", "variant", "best", "worst", "greedy", "evaluations", "seconds")
    bound = (
        f"{settings.evaluations:,} simulated executions"
        if settings.budget_s is None
        else f"{settings.budget_s:g} seconds"
    )
    origin = ", ".join(f"{key} {value}" for key, value in provenance().items())
    return (
        f"Stages 1 and 2 from scratch within {bound}, {settings.seeds} seeds, over the best "
        f"known\n\n{format_table(columns, rows)}\n"
        f"Made by `experiments.search_ablation`: {origin}.\n"
    )


if __name__ == "__main__":
    cli.run(main, AblationSettings, "What each part of stage 2 is worth.")
