"""Measured costs: a calibration of devices, its file, and the costs that it gives.

`dj.engine.measure_calibration` makes one; `make_costs` takes it in place of a cluster.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from doppler_jax.costs.calls import CallCosts
from doppler_jax.costs.digests import kernel_digests
from doppler_jax.costs.observed import fit_line
from doppler_jax.files import PathLike, nulls, read_fields, read_numbers, write_fields
from doppler_jax.types import Costs, ShardedProgram

FORMAT = "doppler_jax.calibration"


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """What one kernel costs on D devices."""

    name: str
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
    calls: CallCosts | None = None
    """What a call takes beyond its makespan, None before it was measured."""

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


def measured_costs(sharded: ShardedProgram, calibration: Calibration) -> Costs:
    """Returns the costs of a program all of whose kernels were measured.

    Raises:
      ValueError: a kernel was not measured, or no transfer between some pair of devices.
    """
    digests = kernel_digests(sharded.kernels)
    missing = [k.name for k, digest in digests.items() if digest not in calibration.kernels]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(
            f"{len(missing)} of the program's {len(digests)} kernels were not measured: "
            f"{shown}; calibrate with this program"
        )
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


_FIELDS = {field.name for field in dataclasses.fields(Calibration)}
_KERNEL_FIELDS = {field.name for field in dataclasses.fields(KernelTime)}


def save_calibration(path: PathLike, calibration: Calibration) -> None:
    """Writes a calibration as JSON that `load_calibration` reads back exactly.

    An existing file is replaced in one step or left as it was.

    Raises:
      ValueError: the file cannot be written.
    """
    fields = {
        "backend": calibration.backend,
        "device_names": list(calibration.device_names),
        "capacity_bytes": nulls(calibration.capacity_bytes),
        "overhead_s": nulls(calibration.overhead_s),
        "kernels": {k: dataclasses.asdict(t) for k, t in calibration.kernels.items()},
        "transfers": [[*link, seconds] for link, seconds in calibration.transfers.items()],
        "handling": [[*ends, seconds] for ends, seconds in calibration.handling.items()],
        "transfer_noise": nulls(calibration.transfer_noise),
        "calls": [] if calibration.calls is None else [*dataclasses.astuple(calibration.calls)],
    }
    write_fields(path, FORMAT, **fields)


def load_calibration(path: PathLike) -> Calibration:
    """Returns the calibration in a file that `save_calibration` wrote.

    Raises:
      ValueError: the file cannot be read or holds none. The message starts with the path
        and names the field.
    """
    data = read_fields(path, FORMAT, _FIELDS)
    names, kernels = data["device_names"], data["kernels"]
    if not isinstance(names, list) or not isinstance(kernels, dict):
        raise ValueError(f"{path}: device_names must be a list and kernels an object")
    calibration = Calibration(
        backend=str(data["backend"]),
        device_names=tuple(map(str, names)),
        capacity_bytes=read_numbers(path, data, "capacity_bytes", null=np.inf),
        overhead_s=read_numbers(path, data, "overhead_s", null=np.nan),
        kernels={k: _read_kernel(path, k, t, len(names)) for k, t in kernels.items()},
        transfers=_read_pairs(path, data, "transfers", len(names)),
        handling=_read_pairs(path, data, "handling", len(names)),
        transfer_noise=float(read_numbers(path, data, "transfer_noise", ndim=0, null=np.nan)),
    )
    if (calls := read_numbers(path, data, "calls")).size:
        if calls.shape != (len(dataclasses.fields(CallCosts)),) or not (calls >= 0).all():
            expected = f"nothing or {len(dataclasses.fields(CallCosts))} numbers >= 0"
            raise ValueError(f"{path}: calls is {calls.tolist()}; expected {expected}")
        calibration = dataclasses.replace(calibration, calls=CallCosts(*calls.tolist()))
    for name in ("capacity_bytes", "overhead_s"):
        count = len(getattr(calibration, name))
        if count != len(names):
            raise ValueError(f"{path}: {name} has {count} entries for {len(names)} devices")
    return calibration


def _read_kernel(path: PathLike, digest: str, fields: Any, num_devices: int) -> KernelTime:
    where = f"kernels[{digest!r}]"
    if not isinstance(fields, dict) or set(fields) != _KERNEL_FIELDS:
        raise ValueError(f"{path}: {where} is {fields!r}; expected {sorted(_KERNEL_FIELDS)}")
    named = {f"{where}.{name}": value for name, value in fields.items()}
    seconds = read_numbers(path, named, f"{where}.seconds")
    if len(seconds) != num_devices or not (seconds >= 0).all():
        raise ValueError(
            f"{path}: {where}.seconds is {fields['seconds']}; expected {num_devices} "
            "numbers >= 0"
        )
    noise = float(read_numbers(path, named, f"{where}.noise", ndim=0))
    return KernelTime(str(fields["name"]), tuple(seconds.tolist()), noise)


def _read_pairs(
    path: PathLike, data: dict[str, Any], name: str, num_devices: int
) -> dict[tuple[int, int, int], float]:
    """Returns seconds by two devices and bytes."""
    found = {}
    for row in read_numbers(path, data, name, ndim=2).tolist():
        ends = row[:2]
        if len(row) != 4 or min(row) < 0 or max(ends) >= num_devices or ends[0] == ends[1]:
            raise ValueError(
                f"{path}: {name}: {row} is not two of {num_devices} devices, bytes and seconds"
            )
        found[int(row[0]), int(row[1]), int(row[2])] = row[3]
    return found
