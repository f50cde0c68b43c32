"""Names that last for kernels and problems: equal for equal ones, in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from doppler_jax.types import Costs, Kernel, TaskGraph

if TYPE_CHECKING:
    import chex

_known: weakref.WeakKeyDictionary[Kernel, str] = weakref.WeakKeyDictionary()
"""Digests of kernels in use: each takes a tracing, and refitting asks again and again."""


def kernel_digests(kernels: Iterable[Kernel]) -> dict[Kernel, str]:
    """Returns a digest for each distinct kernel: of its jaxpr, shapes and dtypes included."""
    found = {}
    for kernel in dict.fromkeys(kernels):
        if kernel not in _known:
            _known[kernel] = _digest(kernel)
        found[kernel] = _known[kernel]
    return found


def problem_digest(graph: TaskGraph, costs: Costs) -> str:
    """Returns a digest of a graph and its costs: of every array, whatever its width."""
    digest = hashlib.sha256()
    for part in (graph, costs):
        for field in dataclasses.fields(part):
            values = getattr(part, field.name)
            # What `has_bytes` decides is in the costs' capacities.
            if values is not None and field.name != "has_bytes":
                _add_array(digest, field.name, values)
    return digest.hexdigest()[:32]


def tree_digest(tree: chex.ArrayTree) -> str:
    """Returns a digest of a tree of arrays, such as a policy's parameters."""
    import jax

    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        _add_array(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()[:32]


def _add_array(digest: hashlib._Hash, name: str, values: chex.Array) -> None:
    array = np.asarray(values)
    wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    digest.update(f"{name}{wide.dtype.kind}{wide.shape}".encode())
    digest.update(np.ascontiguousarray(wide).tobytes())


def _digest(kernel: Kernel) -> str:
    import jax

    text = str(jax.make_jaxpr(kernel.fn)(*kernel.operands))
    # Callbacks print as objects at an address, which differs from process to process.
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()[:20]
