"""How far float32 makespans lie from float64 ones: `python -m experiments.precision`.

Rounding itself is small. But float32 can swap two events that are close, after which the
executions differ, so the tail of the distribution matters, not its centre.
"""

import dataclasses
import pathlib

import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.baselines.simple import random_placements
from doppler_jax.files import write_json_atomic
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.reports.tables import format_table, print_table
from doppler_jax.simulator.simulate import simulate_padded
from experiments.config import check_settings
from experiments.provenance import provenance
from experiments.yardsticks.layered import layered_problem

LEVELS = (0.5, 0.9, 0.99, 1.0)
COLUMNS = ("tasks", "placements", "beyond 1e-5", *(f"quantile {level:g}" for level in LEVELS))


@dataclasses.dataclass(frozen=True)
class PrecisionSettings:
    """What to measure."""

    sizes: tuple[int, ...] = (1024, 4096, 16384)
    """Tasks of layered graphs, 16 wide, with lognormal costs on 4 devices."""
    batch: int = 256
    """Random placements of each graph."""
    runs: pathlib.Path = pathlib.Path("runs")
    """precision.json and precision.md go here."""


def main(settings: PrecisionSettings) -> None:
    """Measures, prints, and writes precision.json and precision.md."""
    check_settings(settings)
    rows, results = [], {}
    for size in settings.sizes:
        graph, costs = layered_problem(size, 4)
        placements = random_placements(costs, np.random.default_rng(0), settings.batch)
        error = relative_error(graph, costs, placements)
        quantiles = np.quantile(error, LEVELS)
        beyond = float((error > 1e-5).mean())
        results[str(size)] = {"beyond": beyond, "quantiles": quantiles.tolist()}
        rows.append(
            (str(size), str(len(error)), f"{beyond:.1%}", *(f"{q:.1e}" for q in quantiles))
        )
    print_table("float32 against float64, relative difference of makespans", COLUMNS, rows)
    settings.runs.mkdir(parents=True, exist_ok=True)
    result = {"provenance": provenance(), "levels": LEVELS, "sizes": results}
    write_json_atomic(settings.runs / "precision.json", result)
    (settings.runs / "precision.md").write_text(format_table(COLUMNS, rows))


def relative_error(graph: dj.TaskGraph, costs: dj.Costs, placements: np.ndarray) -> np.ndarray:
    """Returns how far `[B]` the float32 makespans of placements `[B, N]` are off."""
    padded = pad_problem(graph, costs)
    rows = np.pad(placements, ((0, 0), (0, padded.padded_tasks - graph.num_tasks)))
    rough_s = np.asarray(simulate_padded(padded, rows).makespan_s, np.float64)
    exact_s = dj.simulate(graph, costs, placements, schedule=False).makespan_s
    return np.abs(rough_s / exact_s - 1)


if __name__ == "__main__":
    cli.run(main, PrecisionSettings, "How far float32 makespans are off.")
