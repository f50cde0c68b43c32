"""Costs as measured: a calibration of devices, and the costs that it gives.

`dj.measure_calibration` makes one through the engine; `make_costs` takes it in place of a
cluster.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from doppler_jax.costs.digests import kernel_digests
from doppler_jax.costs.linear_fit import fit_line
from doppler_jax.costs.observed import Observations, observe
from doppler_jax.types import Cluster, Costs, Schedule, ShardedProgram

_FEWEST = 3
"""Observations that `refit` takes for a median."""


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """What one kernel costs on D devices."""

    name: str
    flops: float
    bytes: float  # operands and results
    seconds: tuple[float, ...]  # [D] of a task that computes it, dispatch included
    noise: float  # log-standard-deviation of repeats


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured seconds of kernels and transfers on D devices of one backend."""

    backend: str
    device_names: tuple[str, ...]  # [D]
    capacity_bytes: np.ndarray  # [D] memory, inf where unknown
    overhead_s: np.ndarray  # [D] dispatch of a task, nan before it was measured
    kernels: Mapping[str, KernelTime]  # by digest
    transfers: Mapping[tuple[int, int, int], float]
    """Seconds by source, destination and bytes, but for what the two devices spend on them."""
    transfer_noise: float  # log-standard-deviation of repeats, nan before it was measured
    handling: Mapping[tuple[int, int, int], float] = dataclasses.field(default_factory=dict)
    """Seconds that a device spends on one end of a transfer, by device, other one and bytes.

    They are 0 where it copies beside its work, and there are none where that was not measured.
    """

    @property
    def num_devices(self) -> int:
        return len(self.device_names)

    @property
    def compute_noise(self) -> float:
        """Log-standard-deviation of a task's seconds, the median of the kernels'."""
        return float(np.median([kernel.noise for kernel in self.kernels.values()] or [0.0]))

    def links(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns `latency_s` and `seconds_per_byte` `[D, D]`, fitted to the transfers.

        Raises:
          ValueError: nothing was measured between some pair of devices.
        """
        d = self.num_devices
        latency_s, seconds_per_byte = np.zeros((d, d)), np.zeros((d, d))
        for s, t in np.argwhere(~np.eye(d, dtype=bool)).tolist():
            found = [(b, y) for (i, j, b), y in self.transfers.items() if (i, j) == (s, t)]
            if not found:
                raise ValueError(f"no transfer from device {s} to device {t} was measured")
            latency_s[s, t], seconds_per_byte[s, t] = fit_line(*np.transpose(found))
        return latency_s, seconds_per_byte

    def handling_rates(self) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """Returns `handling_s` and `handling_s_per_byte` `[D]`, fitted, if it was measured."""
        if not self.handling:
            return None, None
        rates = np.zeros((2, self.num_devices))
        for d in range(self.num_devices):
            found = [(b, y) for (i, _, b), y in self.handling.items() if i == d and y > 0]
            if found:
                rates[:, d] = fit_line(*np.transpose(found))
        return rates[0], rates[1]

    def cluster(self) -> Cluster:
        """Returns rates for programs whose kernels are yet to be cut.

        A device computes and moves memory as fast as in the kernel that did so fastest.

        Raises:
          ValueError: no kernel was measured, or no transfer between some pair.
        """
        if not self.kernels:
            raise ValueError("no kernel was measured")
        kernels = list(self.kernels.values())
        # A kernel shorter than the overhead would have an absurd rate, or a negative one.
        own_s = np.array([kernel.seconds for kernel in kernels])
        own_s = np.maximum(own_s - self.overhead_s, own_s / 2)
        latency_s, seconds_per_byte = self.links()
        with np.errstate(divide="ignore"):
            link_bytes_per_s = 1.0 / seconds_per_byte

        def fastest(amounts: list[float]) -> np.ndarray:
            rates = (np.array(amounts)[:, None] / own_s).max(axis=0)
            return np.where(rates > 0, rates, np.inf)

        return Cluster(
            flops_per_s=fastest([kernel.flops for kernel in kernels]),
            memory_bytes_per_s=fastest([kernel.bytes for kernel in kernels]),
            memory_bytes=self.capacity_bytes.copy(),
            launch_s=self.overhead_s.copy(),
            latency_s=latency_s,
            link_bytes_per_s=link_bytes_per_s,
        )

    def refit(self, sharded: ShardedProgram, traces: Iterable[Schedule]) -> "Calibration":
        """Returns the calibration with what these executions showed in place of before.

        What was seen fewer than three times stays.

        Args:
          sharded: the program that ran, as it was placed (with its segments, if fused).
          traces: of work-conserving executions, on these devices.

        Raises:
          ValueError: a kernel of the program was not measured before, or a trace is of
            another number of tasks or devices.
        """
        traces = list(traces)
        self.check_kernels(sharded)
        n, d = sharded.graph.num_tasks, self.num_devices
        for trace in traces:
            places = np.asarray(trace.placement)
            if places.shape != (n,) or places.max(initial=0) >= d:
                raise ValueError(
                    f"a trace places {len(places)} tasks on devices up to "
                    f"{places.max(initial=0)}; expected {n} tasks on {d} devices"
                )
        return self.updated(observe(sharded, traces, measured_costs(sharded, self)))

    def updated(self, seen: Observations) -> "Calibration":
        """Returns the calibration with these medians, of known kernels, in place of before."""
        kernels = dict(self.kernels)
        for (digest, device), seconds in seen.tasks.items():
            if len(seconds) >= _FEWEST:
                before = kernels[digest]
                row = list(before.seconds)
                row[device] = float(np.median(seconds))
                kernels[digest] = dataclasses.replace(before, seconds=tuple(row))
        overhead_s = self.overhead_s.copy()
        for device, seconds in seen.overheads.items():
            if len(seconds) >= _FEWEST:
                overhead_s[device] = np.median(seconds)
        enough = {k: y for k, y in seen.transfers.items() if len(y) >= _FEWEST}
        transfers = {**self.transfers, **{k: float(np.median(y)) for k, y in enough.items()}}
        return dataclasses.replace(
            self, kernels=kernels, overhead_s=overhead_s, transfers=transfers
        )

    def check_kernels(self, sharded: ShardedProgram) -> None:
        """Raises `ValueError` that lists the program's kernels that were not measured."""
        digests = kernel_digests(sharded.kernels)
        missing = [k.name for k, digest in digests.items() if digest not in self.kernels]
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ValueError(
                f"{len(missing)} of the program's {len(digests)} kernels were not measured: "
                f"{shown}; calibrate with this program"
            )


def measured_costs(sharded: ShardedProgram, calibration: Calibration) -> Costs:
    """Returns the costs of a program all of whose kernels were measured.

    Raises:
      ValueError: a kernel was not measured, or no transfer between some pair of devices.
    """
    calibration.check_kernels(sharded)
    digests = kernel_digests(sharded.kernels)
    seconds = [calibration.kernels[digests[kernel]].seconds for kernel in sharded.kernels]
    latency_s, seconds_per_byte = calibration.links()
    handling_s, handling_s_per_byte = calibration.handling_rates()
    return Costs(
        compute_s=np.array(seconds, np.float64).reshape(-1, calibration.num_devices),
        tensor_bytes=sharded.graph.tensor_bytes.copy(),
        input_bytes=sharded.graph.input_bytes.copy(),
        latency_s=latency_s,
        seconds_per_byte=seconds_per_byte,
        capacity_bytes=calibration.capacity_bytes.copy(),
        handling_s=handling_s,
        handling_s_per_byte=handling_s_per_byte,
    )
