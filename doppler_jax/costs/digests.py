"""Names for kernels that last: equal for equal computations, in every process."""

import hashlib
import re
import weakref
from collections.abc import Iterable

import jax

from doppler_jax.types import Kernel

_known: "weakref.WeakKeyDictionary[Kernel, str]" = weakref.WeakKeyDictionary()
"""Digests of kernels in use: each takes a tracing, and refitting asks again and again."""


def kernel_digests(kernels: Iterable[Kernel]) -> dict[Kernel, str]:
    """Returns a digest for each distinct kernel: of its jaxpr, shapes and dtypes included."""
    found = {}
    for kernel in dict.fromkeys(kernels):
        if kernel not in _known:
            _known[kernel] = _digest(kernel)
        found[kernel] = _known[kernel]
    return found


def _digest(kernel: Kernel) -> str:
    text = str(jax.make_jaxpr(kernel.fn)(*kernel.operands))
    # Callbacks print as objects at an address, which differs from process to process.
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()[:20]
