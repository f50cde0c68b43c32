"""Little programs that show what kernels and transfers cost, run by the engine itself."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.graphs.build import make_graph
from doppler_jax.programs.blocks import num_bytes
from doppler_jax.types import (
    InputBlock,
    InputRef,
    Kernel,
    Ref,
    ShardedProgram,
    TensorRef,
)

NUM_SENT = 16
"""Tensors that each device sends in a `handling_program`."""

_LAG = 3  # turns from making a tensor to reading it
_FIRST_BYTES = 4
_WORK_SIZE = 320
_BYTES_PER_WORK = 1 << 19  # of a transfer, for each task of work that outlasts it


def kernel_program(
    kernels: Sequence[Kernel], num_devices: int
) -> tuple[ShardedProgram, np.ndarray]:
    """Returns a program that runs each kernel once on each device, and its placement.

    All tasks read arguments only, so no device ever waits; every device runs the kernels
    in the given order, after a task that takes on it what the start of a call costs.
    Arguments are the operands of all kernels, flat.
    """
    avals = [aval for kernel in kernels for aval in kernel.operands]
    refs: list[tuple[Ref, ...]] = []
    for kernel in kernels:
        first = sum(map(len, refs))
        refs.append(tuple(InputRef(first + i) for i in range(len(kernel.operands))))
    first_kernel = _fill_kernel(None, 1)
    sharded = _program([first_kernel, *kernels] * num_devices, [(), *refs] * num_devices, avals)
    return sharded, np.repeat(np.arange(num_devices), len(kernels) + 1)


def transfer_program(
    sizes: Sequence[int], source: int, destination: int
) -> tuple[ShardedProgram, np.ndarray]:
    """Returns a chain of tasks to and fro between two devices, and its placement.

    Along it each size, in bytes, is moved once each way, one transfer at a time, after 4
    bytes that take on them what the start of a call costs.
    """
    lengths = [_FIRST_BYTES // 4] * 2 + [size // 4 for size in sizes for _ in range(2)]
    chain = [
        _fill_kernel(read, made)
        for read, made in zip([None, *lengths], [*lengths, 1], strict=True)
    ]
    refs: list[tuple[Ref, ...]] = [(), *((TensorRef(x),) for x in range(len(lengths)))]
    sharded = _program(chain, refs, ())
    return sharded, np.where(np.arange(len(chain)) % 2, destination, source)


def handling_program(
    size: int, first: int, second: int
) -> tuple[ShardedProgram, np.ndarray, np.ndarray, np.ndarray]:
    """Returns a program in which two devices make and read `NUM_SENT` tensors of `size` bytes.

    Between one tensor and the next there is other work, enough for a transfer to end in.

    Returns:
      The program, two placements and a priority: by the first placement each device reads what
      the other made, by the second its own. Each runs as many tasks of a kind by either.
    """
    work, make = _work_kernel(), _fill_kernel(None, size // 4)
    read = _total_kernel(size // 4)
    kernels, refs, apart, home, rank = [], [], [], [], []
    made: dict[tuple[int, int], int] = {}

    def add(kernel: Kernel, operands: tuple[Ref, ...], places: tuple[int, int]) -> None:
        kernels.append(kernel)
        refs.append(operands)
        apart.append(places[0])
        home.append(places[1])
        rank.append(turn)

    for turn in range(NUM_SENT + _LAG):
        for device, other in ((first, second), (second, first)):
            if turn < NUM_SENT:
                made[device, turn] = sum(len(kernel.results) for kernel in kernels)
                add(make, (), (device, device))
            for _ in range(1 + size // _BYTES_PER_WORK):
                add(work, (InputRef(0),), (device, device))
            if turn >= _LAG:
                add(read, (TensorRef(made[device, turn - _LAG]),), (other, device))
    sharded = _program(kernels, refs, work.operands)
    return sharded, np.array(apart), np.array(home), np.array(rank, np.float64)


def random_arguments(sharded: ShardedProgram, rng: np.random.Generator) -> list[jax.Array]:
    """Returns flat arguments that any kernel can take: indices 0, positive numbers."""

    def draw(aval: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(aval.dtype, jnp.floating):
            return jnp.asarray(rng.uniform(0.5, 1.5, aval.shape), aval.dtype)
        return jnp.zeros(aval.shape, aval.dtype)

    return [draw(aval) for aval in sharded.arg_avals]


@functools.cache
def _work_kernel() -> Kernel:
    """Returns a kernel that takes a CPU core about a millisecond."""
    square = jax.ShapeDtypeStruct((_WORK_SIZE, _WORK_SIZE), jnp.float32)
    return Kernel("work", lambda a: (a @ a,), (square,), (square,))


@functools.cache
def _total_kernel(length: int) -> Kernel:
    """Returns a kernel that reads all of a float32 `[length]`."""
    vector = jax.ShapeDtypeStruct((length,), jnp.float32)
    total = jax.ShapeDtypeStruct((1,), jnp.float32)
    return Kernel("total", lambda x: (x.sum(keepdims=True),), (vector,), (total,))


@functools.cache
def _fill_kernel(read: int | None, made: int) -> Kernel:
    """Returns a kernel that makes float32 `[made]` from the first of `[read]`, or of 1."""

    def vector(length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((length,), jnp.float32)

    def fn(*operands: jax.Array) -> tuple[jax.Array]:
        first = operands[0][0] if operands else jnp.float32(1.0)
        return (jnp.full((made,), first),)

    operands = () if read is None else (vector(read),)
    return Kernel(f"fill {made}", fn, operands, (vector(made),))


def _program(
    kernels: Sequence[Kernel],
    refs: Sequence[tuple[Ref, ...]],
    avals: Sequence[jax.ShapeDtypeStruct],
) -> ShardedProgram:
    """Returns a program without outputs whose graph inputs are its arguments."""
    results = [(v, aval) for v, kernel in enumerate(kernels) for aval in kernel.results]
    reads = [(ref, v) for v, row in enumerate(refs) for ref in row]
    edges = [(ref.tensor, v) for ref, v in reads if isinstance(ref, TensorRef)]
    input_edges = [(ref.input, v) for ref, v in reads if isinstance(ref, InputRef)]
    graph = make_graph(
        flops=np.zeros(len(kernels)),
        tensor_producer=[v for v, _ in results],
        tensor_bytes=[num_bytes(aval) for _, aval in results],
        edge_tensor=[x for x, _ in edges],
        edge_reader=[v for _, v in edges],
        input_bytes=[num_bytes(aval) for aval in avals],
        input_edge_input=[i for i, _ in input_edges],
        input_edge_reader=[v for _, v in input_edges],
    )
    return ShardedProgram(
        graph=graph,
        names=tuple(f"{kernel.name} #{v}" for v, kernel in enumerate(kernels)),
        kernels=tuple(kernels),
        operands=tuple(refs),
        inputs=tuple(
            InputBlock(i, (0,) * len(aval.shape), aval.shape) for i, aval in enumerate(avals)
        ),
        outputs=(),
        arg_avals=tuple(avals),
        consts=(),
        in_tree=jax.tree.structure((tuple(avals), {})),
        out_tree=jax.tree.structure(()),
    )
