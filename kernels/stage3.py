"""Stage 3 as a command: the policy of stage 2 learns on from times measured on this machine.

It begins with the best of that policy's samples by costs that are measured too.
"""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from doppler_jax.costs.build import make_costs
from doppler_jax.graphs.build import topological_order
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.problems import (
    choose,
    choose_workload,
    local_devices,
    saved_host,
    use_host_devices,
    workload_label,
)
from doppler_jax.programs.workloads import make_arrays, make_workload
from doppler_jax.reports.tables import format_seconds
from doppler_jax.simulator.finalists import best_placement, start_order
from doppler_jax.training.settings import Stage3Settings, check_settings
from doppler_jax.training.stages import StageResult, find_policy, run_stage3
from doppler_jax.types import Plan

from .calibrate import measure_calibration
from .local import LocalDevices
from .measure import make_paired_measure
from .processes import LAUNCHERS

NUM_SAMPLES = 64
"""Of stage 2's policy, the best of which is the first incumbent."""


def stage3(settings: Stage3Settings) -> StageResult:
    """Does `python -m doppler_jax train stage3`: trains and says where the result is."""
    if settings.graph is not None:
        raise ValueError(
            f"{settings.graph}: stage 3 measures real executions, and a graph file has no "
            "kernels to execute; give a workload, or stop after stage 2"
        )
    check_settings(settings)
    make_workload(settings.workload, settings.measured_preset)  # unknown names end here,
    use_host_devices(settings.host_devices)
    backend = choose_backend(settings.backend, settings.host_devices)
    simulated = choose(settings, settings.runs / "stage2")
    before = find_policy(settings.runs / "stage2" / simulated.name, "stage2")
    label = workload_label(
        settings.workload, settings.measured_preset, settings.strategy, settings.carry
    )
    folder = settings.runs / "stage3" / f"{label}-{backend}-after-{settings.cluster}"
    with open_devices(backend, settings.host_devices) as devices:
        chosen = choose_workload(
            settings.workload,
            settings.measured_preset,
            saved_host(folder),
            "host",
            settings.strategy,
            carry=settings.carry,
        )
        workload, sharded = chosen.workload, chosen.sharded
        assert workload is not None
        assert sharded is not None
        calibration = measure_calibration(sharded, devices, path=folder / "calibration.json")
        # Times of another guard must not mix with those in the log.
        chosen = dataclasses.replace(
            chosen,
            name=f"{chosen.name}-{backend}-{settings.max_slowdown:g}x",
            costs=make_costs(sharded, calibration),
        )
        inputs = make_policy_inputs(chosen.graph, chosen.costs)
        key, links = jax.random.key(settings.seed), settings.training.links
        samples = policy_candidates(inputs, before, key, NUM_SAMPLES)
        placement, schedule = best_placement(chosen.graph, chosen.costs, samples, links)
        rank = start_order(schedule, np.argsort(topological_order(chosen.graph)))
        result = run_stage3(
            chosen,
            folder,
            before,
            Plan(placement, rank, "in_order"),
            make_paired_measure(
                sharded,
                make_arrays(workload, jax.random.key(settings.seed)),
                devices,
                max_slowdown=settings.max_slowdown,
            ),
            seed=settings.seed,
            num_updates=settings.num_updates,
            config=settings.training,
            save_every_s=settings.save_every_s,
        )
    report(result)
    return result


def report(result: StageResult) -> None:
    """Prints stage 3's placement beside stage 2's, as measured at the end."""
    found = result.comparison
    assert found is not None
    low, high = found.interval
    print(
        f"stage 3: {format_seconds(found.seconds)} measured, stage 2: "
        f"{format_seconds(found.first_s)}; the last incumbent took {found.ratio:.3f} of the "
        f"first's time in pairs (95%: {low:.3f} to {high:.3f}); in {result.folder}"
    )


def choose_backend(choice: str, num_devices: int) -> str:
    """Returns the backend of a setting, "auto" being what isolates devices best here.

    CPU devices of the backend `local` share the cores of this process; those of `ray` have
    a core each, if there are as many.

    Raises:
      ValueError: there is no such backend.
    """
    if choice != "auto":
        known = ("local", *LAUNCHERS)
        if choice not in known:
            raise ValueError(f"unknown backend {choice!r}; known: auto, {', '.join(known)}")
        return choice
    has_accelerator = any(device.platform != "cpu" for device in jax.devices())
    has_ray = importlib.util.find_spec("ray") is not None
    enough = num_devices >= 2 and (os.cpu_count() or 1) >= num_devices
    return "ray" if has_ray and enough and not has_accelerator else "local"


@contextlib.contextmanager
def open_devices(backend: str, count: int) -> Iterator[Sequence[Any]]:
    """Gives so many devices of a backend, which are closed with the context.

    Raises:
      ValueError: there are fewer, or the backend cannot be used here.
    """
    if (backend := choose_backend(backend, count)) in LAUNCHERS:
        with LAUNCHERS[backend](count) as devices:
            yield devices
        return
    local = local_devices()[:count]
    if len(local) < count:
        raise ValueError(
            f"{count} devices were asked for, but there are {len(local)} "
            f"{local[0].device_kind} devices"
        )
    yield LocalDevices(local)
