"""Where a figure comes from: written beside every result."""

import datetime
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax


def provenance() -> dict[str, Any]:
    """Returns commit, machine, library version and date."""
    devices = jax.devices()
    return {
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def _commit() -> str:
    """Returns the commit of this checkout, "unknown" without git or outside one."""
    command = ["git", "describe", "--always", "--dirty"]
    here = pathlib.Path(__file__).parent
    try:
        described = subprocess.run(
            command, cwd=here, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown"
    return described.stdout.strip() or "unknown"
