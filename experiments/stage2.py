"""Stage 2 from the command line: `make stage2 WORKLOAD=ffnn CLUSTER=p100x4`."""

import math

from doppler_jax import cli
from doppler_jax.reports.tables import format_seconds
from doppler_jax.training.run import Bounds
from experiments.config import Stage2Settings, check_settings
from experiments.problems import choose, use_host_devices
from experiments.stages import find_policy, run_stage2


def main(settings: Stage2Settings) -> None:
    """Trains and says where the result is."""
    check_settings(settings)
    use_host_devices(settings.host_devices)
    chosen = choose(settings, settings.runs / "stage2")
    trained = run_stage2(
        chosen,
        settings.runs / "stage2" / chosen.name,
        find_policy(settings.runs / "stage1" / chosen.name, "stage1"),
        seed=settings.seed,
        num_updates=settings.num_updates,
        config=settings.training,
        bounds=_bounds(settings),
        save_every_s=settings.save_every_s,
    )
    print(f"stage 2: {format_seconds(trained.seconds, 6)} simulated, in {trained.folder}")


def _bounds(settings: Stage2Settings) -> Bounds:
    return Bounds(
        episodes=math.inf if settings.episodes is None else settings.episodes,
        seconds=math.inf if settings.budget_s is None else settings.budget_s,
        makespan_s=settings.target_s or 0.0,
    )


if __name__ == "__main__":
    cli.run(main, Stage2Settings, "Policy gradient in the simulator.")
