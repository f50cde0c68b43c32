"""What does not change during executions under `duplex` links: who reads what, and where."""

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator.lanes import at, column, larger
from doppler_jax.types import pytree


@pytree
class EngineTables:
    """A problem and L placements of it. Per-task tables of L lanes are flat.

    The R reads are those of graph inputs that have a home, then those of tensors; the reads
    of an item (an input or a tensor) adjoin. The last is of nothing, by the task that never
    runs. Items are numbered in the order of service: inputs, then tensors, by id.
    """

    padded: PaddedProblem
    placement: chex.Array  # [L * (N + 1)] int32
    rank: chex.Array | None  # [L * (N + 1)] queue key; None under `fifo`
    handling_s: chex.Array | None  # [L * (N + 1)], see `handling.py`
    transfer_factor: chex.Array | None  # [(T + 1) * D] noise
    base: chex.Array  # [L] int32, where a lane's tasks begin
    reader: chex.Array  # [R] int32
    first: chex.Array  # [R] int32, first read of the same item
    count: chex.Array  # [R] int32, at an item's first read: its reads
    num_bytes: chex.Array  # [R]
    transfer: chex.Array  # [R, L] int32 code of the transfer that serves the read; -1 if none
    one: chex.Array  # [] 1.0, see `hold`

    @property
    def num_homes(self) -> int:
        """How many reads are of graph inputs."""
        return self.padded.home_reader.shape[0]

    @property
    def device_bits(self) -> int:
        """How many bits of a code hold a device."""
        return max(self.padded.num_devices - 1, 1).bit_length()

    def hold(self, x: chex.Array) -> chex.Array:
        """Returns x. XLA repeats cheap operations in each of their readers, but no division."""
        return jax.lax.div(x, jnp.broadcast_to(self.one.astype(x.dtype), x.shape))

    def task_code(self, task: chex.Array | int, device: chex.Array | int) -> chex.Array:
        """Returns a number for a task on a device, in the order of tasks."""
        return (task << self.device_bits) + device

    def task_of(self, code: chex.Array) -> tuple[chex.Array, chex.Array]:
        """Returns task and device."""
        return code >> self.device_bits, code & ((1 << self.device_bits) - 1)

    def ends_of(self, transfer: chex.Array) -> tuple[chex.Array, chex.Array]:
        """Returns source and destination of a transfer; of -1, any."""
        devices = (1 << self.device_bits) - 1
        return transfer & devices, (transfer >> self.device_bits) & devices

    def move_s(
        self, read: chex.Array, source: chex.Array, destination: chex.Array
    ) -> chex.Array:
        """Returns the seconds `[L]` that moving what is read takes."""
        padded = self.padded
        link = source * padded.num_devices + destination
        move_s = at(padded.latency_s.reshape(-1), link) + at(self.num_bytes, read) * at(
            padded.seconds_per_byte.reshape(-1), link
        )
        if self.transfer_factor is None:
            return move_s
        edge = read - self.num_homes
        tensor = at(padded.edge_tensor, larger(edge, 0))
        factor = at(self.transfer_factor, tensor * padded.num_devices + destination)
        return jnp.where(edge >= 0, move_s * factor, move_s)


def make_tables(
    padded: PaddedProblem,
    placement: chex.Array,
    rank: chex.Array | None,
    handling_s: chex.Array | None,
    transfer_factor: chex.Array | None,
) -> EngineTables:
    """Returns the tables of placements `[L, N + 1]`, ranks, handling, and factors `[T, D]`."""
    lanes, rows = placement.shape
    dtype = jnp.result_type(padded.compute_s)
    if transfer_factor is not None:  # a row more, so that there is one where T is 0
        transfer_factor = jnp.pad(transfer_factor, ((0, 1), (0, 0))).reshape(-1)
    reader = jnp.append(padded.home_reader, padded.edge_reader)
    opens = jnp.append(padded.home_opens, padded.edge_opens)
    opens |= reader == padded.padded_tasks  # padding: each an item by itself
    read = jnp.arange(len(reader), dtype=jnp.int32)
    first = jax.lax.cummax(jnp.where(opens, read, 0))
    following = jnp.append(jnp.where(opens, read, len(read))[1:], jnp.int32(len(read)))
    return EngineTables(
        padded=padded,
        placement=placement.reshape(-1),
        rank=None if rank is None else rank.reshape(-1).astype(dtype),
        handling_s=None if handling_s is None else handling_s.reshape(-1),
        transfer_factor=transfer_factor,
        base=jnp.arange(lanes, dtype=jnp.int32) * rows,
        reader=reader,
        first=first,
        count=jax.lax.cummin(following, reverse=True) - first,
        num_bytes=jnp.append(padded.home_bytes, padded.edge_bytes),
        transfer=_transfers(padded, placement.T, reader, first),
        # A constant would be divided by at compile time; this one XLA cannot see through.
        one=jnp.where(padded.num_tasks >= 0, 1, 2).astype(dtype),
    )


def _transfers(
    padded: PaddedProblem, placement: chex.Array, reader: chex.Array, first: chex.Array
) -> chex.Array:
    """Returns the codes `[R, L]` of transfers, ordered by item, then destination."""
    num_homes = len(padded.home_reader)
    edge = jnp.arange(len(padded.edge_reader), dtype=jnp.int32)
    begun = padded.first_edge[None] <= edge[:, None]  # edges are in the order of producers
    producer = begun.sum(axis=1, dtype=jnp.int32) - 1
    home = jnp.broadcast_to(padded.home_device[:, None], (num_homes, placement.shape[1]))
    source = jnp.concatenate([home, placement[producer]])
    destination = placement[reader]
    item = jnp.append(first[:num_homes], num_homes + padded.edge_tensor)
    bits = max(padded.num_devices - 1, 1).bit_length()
    code = (((item[:, None] << bits) + destination) << bits) + source
    served = (source != destination) & (reader < padded.padded_tasks)[:, None]
    return jnp.where(served, code, -1)


def count_inputs(tables: EngineTables) -> chex.Array:
    """Returns how many things `[N + 1, L]` each task waits for at time 0."""
    padded, lanes = tables.padded, len(tables.base)
    missing = jnp.broadcast_to(
        padded.num_producers[:, None], (len(padded.num_producers), lanes)
    )
    if tables.num_homes == 0:
        return missing
    task = column(len(missing), tables.reader)

    def count(i: chex.Array, missing: chex.Array) -> chex.Array:
        reads = (task == tables.reader[i]) & (tables.transfer[i] >= 0)[None]
        return missing + reads.astype(missing.dtype)

    return jax.lax.fori_loop(0, tables.num_homes, count, missing)
