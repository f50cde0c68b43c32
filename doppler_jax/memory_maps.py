"""Keeps a process that places many graphs alive: what it compiles takes up memory maps.

Graphs seldom share their padded shapes, and on a CPU every compilation maps memory anew. At
the system's bound (Linux: vm.max_map_count, usually 65,530) LLVM cannot allocate and the
process dies.
"""

import sys

SHARE = 0.5
"""Of the bound, beyond which compiled programs are dropped: one placement may map much more."""

_BOUND = "/proc/sys/vm/max_map_count"
_MAPS = "/proc/self/maps"


def free_memory_maps() -> None:
    """Drops what JAX has compiled in this process if it has taken too many memory maps.

    Jitted functions compile again when they are called next; what was compiled ahead of time
    is kept. Does nothing where the system tells no bound.
    """
    if "jax" not in sys.modules:
        return
    try:
        with open(_BOUND) as file:
            bound = int(file.read())
        with open(_MAPS, "rb") as file:
            count = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except (OSError, ValueError):
        return
    if count > SHARE * bound:
        sys.modules["jax"].clear_caches()
