"""Stage 3 from the command line: `make stage3 WORKLOAD=ffnn CLUSTER=p100x4`.

The policy of stage 2 for that cluster learns on from times measured on this machine's
devices. It begins with the best of its samples by costs that are measured too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.engine.calibrate import measure_calibration
from doppler_jax.engine.devices import Options
from doppler_jax.engine.placed import as_devices
from doppler_jax.learned import policy_candidates
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.reports.tables import format_seconds
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.paired import Measure
from experiments.config import Stage3Settings, check_settings
from experiments.isolation import choose_backend
from experiments.machine import Machine
from experiments.problems import (
    Chosen,
    choose,
    choose_workload,
    saved_host,
    use_host_devices,
    workload_label,
)
from experiments.stages import Trained, find_policy, run_stage3

NUM_SAMPLES = 64
"""Of stage 2's policy, the best of which is the first incumbent."""


def main(settings: Stage3Settings) -> None:
    """Trains and says where the result is."""
    if settings.graph is not None:
        raise ValueError(
            f"{settings.graph}: stage 3 measures real executions, and a graph file has no "
            "kernels to execute; give a workload, or stop after stage 2"
        )
    check_settings(settings)
    dj.make_workload(settings.workload, settings.measured_preset)  # unknown names end here,
    use_host_devices(settings.host_devices)
    backend = choose_backend(settings.backend, settings.host_devices)
    simulated = choose(settings, settings.runs / "stage2")
    before = find_policy(settings.runs / "stage2" / simulated.name, "stage2")
    label = workload_label(settings.workload, settings.measured_preset, settings.strategy)
    folder = settings.runs / "stage3" / f"{label}-{backend}-after-{settings.cluster}"
    host = saved_host(folder)
    chosen = choose_workload(
        settings.workload, settings.measured_preset, host, "host", settings.strategy
    )
    with Machine(settings.host_devices) as machine:
        devices = machine.devices(backend)
        as_devices(devices).check_options(Options(mode=settings.mode))
        assert chosen.sharded is not None
        calibration = measure_calibration(
            chosen.sharded, devices, path=folder / "calibration.json"
        )
        # Times of another mode or guard must not mix with those in the log.
        chosen = dataclasses.replace(
            chosen,
            name=f"{chosen.name}-{backend}-{settings.mode}-{settings.max_slowdown:g}x",
            costs=dj.make_costs(chosen.sharded, calibration),
        )
        trained = run_stage3(
            chosen,
            folder,
            before,
            first_incumbent(chosen, before, settings.seed, settings.training.links),
            make_measure(settings, chosen, devices),
            seed=settings.seed,
            num_updates=settings.num_updates,
            config=settings.training,
            save_every_s=settings.save_every_s,
        )
    report(trained)


def first_incumbent(chosen: Chosen, policy: dj.Policy, seed: int, links: str) -> np.ndarray:
    """Returns the best `[N]` of a policy's samples, by the simulator."""
    problem = make_policy_inputs(chosen.graph, chosen.costs)
    candidates = policy_candidates(problem, policy, jax.random.key(seed), NUM_SAMPLES)
    return best_placement(chosen.graph, chosen.costs, candidates, links)[0]


def make_measure(settings: Stage3Settings, chosen: Chosen, devices: Sequence[Any]) -> Measure:
    """Returns what measures placements of a workload, on arrays of its shapes."""
    assert chosen.workload is not None
    assert chosen.sharded is not None
    return dj.make_paired_measure(
        chosen.sharded,
        dj.make_arrays(chosen.workload, jax.random.key(settings.seed)),
        devices,
        settings.mode,
        max_slowdown=settings.max_slowdown,
    )


def report(trained: Trained) -> None:
    """Prints stage 3's placement beside stage 2's, as measured at the end."""
    found = trained.comparison
    assert found is not None
    low, high = found.interval
    print(
        f"stage 3: {format_seconds(found.seconds)} measured, stage 2: "
        f"{format_seconds(found.first_s)}; the last incumbent took {found.ratio:.3f} of the "
        f"first's time in pairs (95%: {low:.3f} to {high:.3f}); in {trained.folder}"
    )


if __name__ == "__main__":
    cli.run(main, Stage3Settings, "Policy gradient on measured times.")
