"""Stage 1 from the command line: `make stage1 WORKLOAD=ffnn CLUSTER=p100x4`."""

from doppler_jax import cli
from doppler_jax.reports.tables import format_seconds
from experiments.config import Stage1Settings, check_settings
from experiments.problems import choose, use_host_devices
from experiments.stages import run_stage1


def main(settings: Stage1Settings) -> None:
    """Trains and says where the result is."""
    check_settings(settings)
    use_host_devices(settings.host_devices)
    chosen = choose(settings, settings.runs / "stage1")
    trained = run_stage1(
        chosen,
        settings.runs / "stage1" / chosen.name,
        seed=settings.seed,
        num_updates=settings.num_updates,
        config=settings.training,
        policy=settings.policy,
        save_every_s=settings.save_every_s,
    )
    print(f"stage 1: {format_seconds(trained.seconds, 6)} simulated, in {trained.folder}")


if __name__ == "__main__":
    cli.run(main, Stage1Settings, "Imitate critical-path list scheduling.")
