"""The largest memory that this process has held."""

import pathlib
import resource


def peak_bytes() -> float:
    """Returns the peak of resident memory, Python and JAX included."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():  # macOS, where it is in bytes
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    # On Linux the ru_maxrss of a new process starts at what its parent held.
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return 1024.0 * int(fields["VmHWM"].split()[0])
