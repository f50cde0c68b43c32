"""Benchmarks, as ratios within one run: `make bench`.

Compilation and steady state are timed apart; every figure is the median of repeats.
"""

import dataclasses

from doppler_jax import cli
from experiments import bench_simulator, bench_training, engine
from experiments.bench_simulator import SimulatorSettings
from experiments.bench_training import TrainingSettings
from experiments.config import StageSettings, check_settings
from experiments.engine import EngineSettings
from experiments.problems import choose, local_devices, use_host_devices


@dataclasses.dataclass(frozen=True)
class BenchSettings(StageSettings):
    """What to measure on; a workload or, with --graph, a task graph's file."""

    workload: str = "llama_layer"
    simulator: SimulatorSettings = dataclasses.field(default_factory=SimulatorSettings)
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)


def main(settings: BenchSettings) -> None:
    """Measures simulator, training and engine, each of which prints and writes its own."""
    check_settings(settings)
    use_host_devices(settings.host_devices)
    chosen = choose(settings, settings.runs / "bench")
    problem = (chosen.name, chosen.graph, chosen.costs)
    bench_simulator.bench(*problem, settings.simulator, settings.runs)
    bench_training.bench(*problem, settings.training, settings.runs)
    if (count := len(local_devices())) > 1:
        overhead = EngineSettings(
            parts=("overhead",), backend="local", devices=count, again=True, runs=settings.runs
        )
        engine.run(overhead)


if __name__ == "__main__":
    cli.run(main, BenchSettings, "Benchmarks of simulator, training and engine.")
