"""Where a figure comes from: written beside every result."""

import datetime
import os
import platform
import subprocess
from typing import Any

import jax


def provenance() -> dict[str, Any]:
    """Returns commit, machine, library version and date."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    devices = jax.devices()
    return {
        "commit": described.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
