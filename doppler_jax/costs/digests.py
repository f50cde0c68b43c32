"""Names for kernels that last: equal for equal computations, in every process."""

import hashlib
import re
from collections.abc import Iterable

import jax

from doppler_jax.types import Kernel


def kernel_digests(kernels: Iterable[Kernel]) -> dict[Kernel, str]:
    """Returns a digest for each distinct kernel: of its jaxpr, shapes and dtypes included."""
    return {kernel: _digest(kernel) for kernel in dict.fromkeys(kernels)}


def _digest(kernel: Kernel) -> str:
    text = str(jax.make_jaxpr(kernel.fn)(*kernel.operands))
    # Callbacks print as objects at an address, which differs from process to process.
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()[:20]
