"""What all command lines share: settings from dataclasses, one line per user error."""

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import tyro


def check_seed(seed: int) -> None:
    """Raises `ValueError` unless JAX takes the seed as it is."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed is {seed}; expected 0 to {2**32 - 1}")


def process_age_s() -> float:
    """Returns the seconds since this process was started, where the system says (Linux)."""
    try:
        started = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        uptime = pathlib.Path("/proc/uptime").read_text().split()[0]
    except OSError:
        return 0.0
    return max(float(uptime) - int(started) / os.sysconf("SC_CLK_TCK"), 0.0)


def run(main: Callable[[Any], None], settings: Any, description: str, **options: Any) -> None:
    """Parses the command line into `settings`, a dataclass or a union of them, for `main`.

    Options are those of `tyro.cli`; `default=` is an instance whose values are the defaults.

    A `ValueError` is a user's error, and so is a file that cannot be read or written: one
    line on standard error, exit code 2. Ctrl-C exits with 130, after `main` has saved what
    it saves.
    """
    try:  # settings check themselves, so parsing may raise, too
        main(tyro.cli(settings, description=description, **options))
    except (ValueError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
