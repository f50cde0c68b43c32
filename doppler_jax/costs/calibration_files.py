"""Calibrations as JSON files."""

import dataclasses
from typing import Any

import numpy as np

from doppler_jax.costs.measured import Calibration, KernelTime
from doppler_jax.files import (
    PathLike,
    check_header,
    parse_json_object,
    read_numbers,
    read_text,
    write_json_atomic,
)

FORMAT = "doppler_jax.calibration"
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
        "capacity_bytes": _nulls(calibration.capacity_bytes),
        "overhead_s": _nulls(calibration.overhead_s),
        "kernels": {k: dataclasses.asdict(t) for k, t in calibration.kernels.items()},
        "transfers": [[*link, seconds] for link, seconds in calibration.transfers.items()],
        "handling": [[*ends, seconds] for ends, seconds in calibration.handling.items()],
        "transfer_noise": _nulls(np.array([calibration.transfer_noise]))[0],
    }
    write_json_atomic(path, {"format": FORMAT, "version": 1, **fields})


def load_calibration(path: PathLike) -> Calibration:
    """Returns the calibration in a file that `save_calibration` wrote.

    Raises:
      ValueError: the file cannot be read or holds none. The message starts with the path
        and names the field.
    """
    data = parse_json_object(path, read_text(path))
    check_header(path, data, FORMAT, _FIELDS)
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
    flops, num_bytes, noise = (
        float(read_numbers(path, named, f"{where}.{name}", ndim=0))
        for name in ("flops", "bytes", "noise")
    )
    return KernelTime(str(fields["name"]), flops, num_bytes, tuple(seconds.tolist()), noise)


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


def _nulls(values: np.ndarray) -> list[float | None]:
    return [float(y) if np.isfinite(y) else None for y in values]
