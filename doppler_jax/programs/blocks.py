"""Arguments into blocks, blocks into outputs: the two ends of every execution."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import SingleDeviceSharding
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import make_graph
from doppler_jax.programs.outputs import Output
from doppler_jax.types import (
    InputBlock,
    InputRef,
    Kernel,
    OutputBlocks,
    Ref,
    ShardedProgram,
    TaskGraph,
    TensorRef,
)

_NUMBERS = (bool, int, float, complex)


def flatten_args(
    sharded: ShardedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Returns the arrays that `InputBlock.source` counts: flat arguments, then constants.

    Raises:
      ValueError: the pytree, or a leaf's shape or dtype, is not what the program was
        traced with; the message names the leaf.
    """
    given = by_position(args, kwargs, sharded.parameters)
    arrays, tree = jax.tree.flatten(given)
    if tree == sharded.in_tree and all(map(_is_like, arrays, sharded.arg_avals)):
        return arrays + list(sharded.consts)
    leaves, tree = jax.tree.flatten_with_path(given)
    if tree != sharded.in_tree:
        raise ValueError(_structure_error([path for path, _ in leaves], tree, sharded.in_tree))
    values, made = [], dict[int, Any]()
    for (path, leaf), aval in zip(leaves, sharded.arg_avals, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"{leaf_name(path)} is {leaf}; expected an array")
        found = leaf_aval(path, leaf)
        if found.shape != aval.shape or found.dtype != aval.dtype:
            raise ValueError(
                f"{leaf_name(path)} is {found.dtype}{list(found.shape)}, "
                f"but the program was traced for {aval.dtype}{list(aval.shape)}"
            )
        if not isinstance(leaf, jax.Array):  # the same one twice stays the same
            if id(leaf) not in made:
                made[id(leaf)] = as_array(leaf)
            leaf = made[id(leaf)]
        values.append(leaf)
    return values + list(sharded.consts)


def _is_like(leaf: Any, aval: jax.ShapeDtypeStruct) -> bool:
    """Returns whether a leaf is beyond doubt what was traced; to tell errors takes longer."""
    is_array = isinstance(leaf, jax.Array)
    return is_array and leaf.shape == aval.shape and leaf.dtype == aval.dtype


def by_position(
    args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments in their positions where keywords name parameters."""
    kwargs = dict(kwargs)
    while len(args) < len(parameters) and parameters[len(args)] in kwargs:
        args = (*args, kwargs.pop(parameters[len(args)]))
    return args, kwargs


def are_tied(sharded: ShardedProgram, values: Sequence[Any]) -> bool:
    """Returns whether arguments that were the same array when traced are so again."""
    return all(values[i] is values[j] for i, j in sharded.ties)


def is_float0(array: Any) -> bool:
    """Returns whether an array has the type of integers' tangents: no content, no device."""
    return getattr(array, "dtype", None) == jax.dtypes.float0


def as_array(leaf: Any) -> Any:
    """Returns an argument as JAX has it, that is as NumPy's array where it is `float0`."""
    return np.asarray(leaf) if is_float0(leaf) else jnp.asarray(leaf)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the readable name of a leaf of `(args, kwargs)`, as `args[0]['w']`."""
    root = ("args", "kwargs")[path[0].idx]
    if root == "args":
        return "args" + jax.tree_util.keystr(path[1:])
    return path[1].key + jax.tree_util.keystr(path[2:])


def leaf_aval(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an argument, the dtype as JAX holds it on devices.

    Raises:
      ValueError: the leaf is not an array, a Python number or a `jax.ShapeDtypeStruct`.
    """
    if (aval := array_aval(leaf)) is not None:
        return aval
    advice = "bind other values with functools.partial"
    if len(path) > 2:  # a part of an argument cannot be bound
        advice = (
            "split the tree: pass its arrays, and join them with the rest inside the "
            "function, as equinox.partition and combine do, or flax.nnx.split and merge"
        )
    raise ValueError(
        f"{leaf_name(path)} is {type(leaf).__name__} {leaf!r:.80}; expected an array, a "
        f"number or a jax.ShapeDtypeStruct ({advice})"
    )


def array_aval(leaf: Any) -> jax.ShapeDtypeStruct | None:
    """Returns likewise, None where the leaf is no array."""
    if isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic):
        leaf = jax.typeof(leaf)  # a weak type
    if isinstance(leaf, np.ndarray | np.generic):
        accepted = leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.number)
    else:
        known = jax.Array | jax.ShapeDtypeStruct | jax.core.ShapedArray
        accepted = isinstance(leaf, known)
    if is_float0(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if not accepted:
        return None
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=weak)


def num_bytes(aval: jax.ShapeDtypeStruct) -> int:
    """Returns the size of an array."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def block_aval(block: InputBlock, array: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a block of an array."""
    shape = tuple(b - a for a, b in zip(block.start, block.limit, strict=True))
    return jax.ShapeDtypeStruct(shape, array.dtype)


def slice_block(value: jax.Array, block: InputBlock) -> jax.Array:
    """Returns block `[start, limit)` of `value`; `value` itself if that is all of it."""
    array: jax.Array = value.whole() if isinstance(value, Output) else value
    if block.limit == array.shape and not any(block.start):
        return array
    if jax.typeof(array).sharding.mesh.explicit_axes:  # which would have to divide slices
        device = min(array.devices(), key=lambda device: device.id)
        array = jax.device_put(array, SingleDeviceSharding(device))  # the type, too
    return lax.slice(array, block.start, block.limit)


def join_blocks(arrays: Sequence[jax.Array], grid: tuple[int, ...]) -> jax.Array:
    """Returns the array whose row-major grid of blocks is `arrays`, `prod(grid)` long."""
    arrays = list(arrays)
    if len(arrays) != math.prod(grid):
        raise ValueError(f"{len(arrays)} blocks for a grid {grid}")
    dtype = arrays[0].dtype
    if len(arrays) > 1 and _is_of_two_bits(dtype):  # XLA for CPUs aborts at joining these
        return join_blocks([a.astype(jnp.int8) for a in arrays], grid).astype(dtype)
    for axis in reversed(range(len(grid))):
        count = grid[axis]
        if count > 1:
            groups = [arrays[i : i + count] for i in range(0, len(arrays), count)]
            arrays = [lax.concatenate(group, axis) for group in groups]
    return arrays[0]


def _is_of_two_bits(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits == 2


def output_bounds(output: OutputBlocks) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields start and limit of each block of an output."""
    shape = [size // count for size, count in zip(output.aval.shape, output.grid, strict=True)]
    for index in itertools.product(*map(range, output.grid)):
        start = tuple(i * size for i, size in zip(index, shape, strict=True))
        yield start, tuple(a + size for a, size in zip(start, shape, strict=True))


def forwarded(sharded: ShardedProgram) -> dict[int, int]:
    """Returns the outputs of carried arguments that no task makes, and their sources."""
    blocks = {o: sharded.outputs[o].blocks[0] for _, o in sharded.carried}
    return {
        o: sharded.inputs[ref.input].source
        for o, ref in blocks.items()
        if isinstance(ref, InputRef)
    }


def donated(sharded: ShardedProgram) -> tuple[int, ...]:
    """Returns the flat arguments that a call takes for good: no output is one of them."""
    refs = (ref for output in sharded.outputs for ref in output.blocks)
    returned = {sharded.inputs[ref.input].source for ref in refs if isinstance(ref, InputRef)}
    return tuple(i for i, _ in sharded.carried if i not in returned)


def join_output(output: OutputBlocks, blocks: Sequence[jax.Array]) -> jax.Array:
    """Returns an output of the function, put together from its blocks; of a weak type if so."""
    joined = join_blocks(blocks, output.grid)
    if output.aval.weak_type and not joined.aval.weak_type:
        return _weaken(joined)
    return joined


@jax.jit
def _weaken(array: jax.Array) -> jax.Array:
    # Nothing else in JAX's public functions makes an array's type a weak one.
    return convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )


def _structure_error(paths: list[Any], tree: Any, expected_tree: Any) -> str:
    placeholder = jax.tree.unflatten(expected_tree, range(expected_tree.num_leaves))
    expected_paths = [path for path, _ in jax.tree.flatten_with_path(placeholder)[0]]
    found, expected = ({leaf_name(path) for path in p} for p in (paths, expected_paths))
    missing, surplus = sorted(expected - found), sorted(found - expected)
    if missing or surplus:
        return (
            "arguments have another structure than traced: "
            f"missing {missing or 'none'}, not expected {surplus or 'none'}"
        )
    return f"arguments have another structure than traced: {tree}, expected {expected_tree}"


def task_graph(
    kernels: Sequence[Kernel],
    operands: Sequence[Sequence[Ref]],
    flops: ArrayLike,
    input_bytes: ArrayLike,
    input_home: ArrayLike | None = None,
    input_maker: ArrayLike | None = None,
) -> TaskGraph:
    """Returns the graph of tasks that call kernels, whose results are its tensors in turn.

    Args:
      kernels: `[N]` one of each task.
      operands: `[N]` what each task reads.
      flops: `[N]` of each task.
      input_bytes: `[I]` of each graph input.
      input_home: `[I]` see `TaskGraph`.
      input_maker: `[I]` see `TaskGraph`.
    """
    made = [(v, num_bytes(aval)) for v, kernel in enumerate(kernels) for aval in kernel.results]
    reads = [(ref, v) for v, refs in enumerate(operands) for ref in refs]
    tensors = [(ref.tensor, v) for ref, v in reads if isinstance(ref, TensorRef)]
    inputs = [(ref.input, v) for ref, v in reads if isinstance(ref, InputRef)]
    return make_graph(
        flops=flops,
        tensor_producer=[v for v, _ in made],
        tensor_bytes=[size for _, size in made],
        edge_tensor=[x for x, _ in tensors],
        edge_reader=[v for _, v in tensors],
        input_bytes=input_bytes,
        input_home=input_home,
        input_maker=input_maker,
        input_edge_input=[i for i, _ in inputs],
        input_edge_reader=[v for _, v in inputs],
    )
