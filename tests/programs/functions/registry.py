"""The functions that both the interpreter's and the engine's tests run, by name."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax import trace
from doppler_jax.programs.partition import shard
from doppler_jax.programs.planner import PartitionPlan
from doppler_jax.programs.task_kernels import KernelCache

EXACT = 1e-5  # max|a - b| over max|b| in float32 where no sum is associated anew
SUMS = 1e-4  # likewise where partial sums may be combined in another order
SHORT = 2e-2  # bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    make: Callable[[], tuple[Callable, tuple]]  # the function and its arguments
    tolerance: float
    unroll_scans: bool

    def trace(self, fn, args):
        """Returns the program of what `make` returned."""
        options = {"unroll_scans": True} if self.unroll_scans else {}
        return trace(fn, *fresh(args), **options)


CASES: dict[str, Case] = {}


def case(*args, tolerance=SUMS, unroll_scans=False):
    """Registers a function with the arguments that it is tested on."""

    def register(fn):
        return built(tolerance, unroll_scans, fn.__name__)(lambda: (fn, args)) and fn

    return register


def built(tolerance=SUMS, unroll_scans=False, name=None):
    """Registers what makes a function and its arguments, when those take work."""

    def register(make):
        known = name or make.__name__
        assert known not in CASES, known
        CASES[known] = Case(make, tolerance, unroll_scans)
        return make

    return register


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def integers(seed, *shape, low=-9, high=9, dtype=np.int32):
    return np.random.default_rng(seed).integers(low, high, size=shape).astype(dtype)


def fill(tree, seed):
    """Returns normal values in place of shapes; positive ones for variances."""
    leaves, treedef = jax.tree.flatten_with_path(tree)
    rng = np.random.default_rng(seed)
    arrays = []
    for path, leaf in leaves:
        values = 0.3 * rng.normal(size=leaf.shape)
        if "var" in jax.tree_util.keystr(path):
            values = 0.5 + values**2
        arrays.append(jnp.asarray(values, leaf.dtype))
    return jax.tree.unflatten(treedef, arrays)


def fresh(args):
    """Returns device arrays; keys cloned, since each may be consumed once."""

    def copy(leaf):
        leaf = jnp.asarray(leaf)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.clone(leaf) if is_key else leaf

    return jax.tree.map(copy, args)


def cut_as(program, groups, counts):
    """Returns the program whose groups are cut into `counts`, whatever they cost."""
    plan = PartitionPlan(tuple(counts), ("",) * len(counts))
    return shard(program, groups, plan, KernelCache())


def assert_same(found, expected, tolerance):
    """Asserts that two pytrees agree: structure, shapes, dtypes, values."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, b), a in zip(
        jax.tree.flatten_with_path(expected)[0], jax.tree.leaves(found), strict=True
    ):
        assert_leaf(a, jnp.asarray(b), tolerance, jax.tree_util.keystr(path))


def assert_leaf(found, expected, tolerance, where):
    """Asserts max|a - b| <= tolerance * max|b|, equality of integers and booleans."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), where
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        found, expected = jax.random.key_data(found), jax.random.key_data(expected)
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        np.testing.assert_array_equal(found, expected, where)
        return
    wide = np.complex128 if jnp.iscomplexobj(expected) else np.float64
    found, expected = np.asarray(found, wide), np.asarray(expected, wide)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite, where)
    np.testing.assert_array_equal(found[~finite], expected[~finite], where)
    scale = np.abs(expected[finite]).max(initial=1e-30)
    difference = np.abs(found[finite] - expected[finite]).max(initial=0.0)
    assert difference <= tolerance * scale, f"{where}: {difference / scale:.2g}"
