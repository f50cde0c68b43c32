"""Stage 3 from the command line: `make stage3 WORKLOAD=ffnn CLUSTER=p100x4`.

The policy of stage 2 for that cluster learns on from times measured on this machine's
devices, whose roofline costs it sees.
"""

import dataclasses

import jax

import doppler_jax as dj
import kernels
from doppler_jax import cli
from doppler_jax.learned import policy_candidates
from doppler_jax.policies.features import make_problem
from doppler_jax.reports.tables import format_seconds
from doppler_jax.simulator.finalists import best_placement
from experiments.config import Stage3Settings, check_settings
from experiments.problems import (
    choose,
    choose_workload,
    local_devices,
    saved_host,
    use_host_devices,
    workload_label,
)
from experiments.stages import find_policy, run_stage3
from kernels.compile import get_runner


def main(settings: Stage3Settings) -> None:
    """Trains and says where the result is."""
    if settings.graph is not None:
        raise ValueError(
            f"{settings.graph}: stage 3 measures real executions, and a graph file has no "
            "kernels to execute; give a workload, or stop after stage 2"
        )
    check_settings(settings)
    dj.make_workload(settings.workload, settings.measured_preset)  # unknown names end here,
    get_runner("local", settings.mode)  # before anything is measured
    use_host_devices(settings.host_devices)
    simulated = choose(settings, settings.runs / "stage2")
    before = find_policy(settings.runs / "stage2" / simulated.name, "stage2")
    label = workload_label(settings.workload, settings.measured_preset, settings.strategy)
    name = f"{label}-host-after-{settings.cluster}"
    folder = settings.runs / "stage3" / name
    host = saved_host(folder)
    chosen = choose_workload(
        settings.workload, settings.measured_preset, host, "host", settings.strategy
    )
    # Times of another mode or number of repeats must not mix with those in the log.
    chosen = dataclasses.replace(
        chosen, name=f"{chosen.name}-{settings.mode}-{settings.repeats}-runs"
    )
    assert chosen.workload is not None
    assert chosen.sharded is not None
    candidates = policy_candidates(
        make_problem(chosen.graph, chosen.costs), before, jax.random.key(settings.seed), 64
    )
    incumbent, _ = best_placement(chosen.graph, chosen.costs, candidates)
    args = dj.make_arrays(chosen.workload, jax.random.key(settings.seed))
    measure = kernels.make_measure(
        chosen.sharded, args, local_devices(), settings.mode, settings.repeats
    )
    trained = run_stage3(
        chosen,
        folder,
        before,
        incumbent,
        lambda placement: measure(placement, None),
        seed=settings.seed,
        num_updates=settings.num_updates,
        config=settings.training,
        save_every_s=settings.save_every_s,
    )
    print(f"stage 3: {format_seconds(trained.seconds)} measured, in {trained.folder}")


if __name__ == "__main__":
    cli.run(main, Stage3Settings, "Policy gradient on measured times.")
