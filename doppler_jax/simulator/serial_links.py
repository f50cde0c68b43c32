"""Links that carry one transfer at a time, for the simulator's lock-step executions.

A link, an ordered pair of devices, serves transfers in the order in which its source
finished their producers, then by tensor; so when a task starts, the arrivals of all it
makes are known.
"""

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator.lanes import at, column, larger, pick, write
from doppler_jax.types import pytree


@pytree
class SerialLinks:
    """The D x D links of L executions."""

    free_s: chex.Array  # [L * D * D] when a link has carried all that was requested
    sent_s: chex.Array  # [D, L] when the tensor in hand reaches each device; -1 if not sent


def send(
    links: SerialLinks,
    *,
    source: chex.Array,
    destination: chex.Array,
    request_s: chex.Array,
    move_s: chex.Array,
    opens: chex.Array,
    real: chex.Array,
    native: bool,
) -> tuple[chex.Array, SerialLinks]:
    """Sends a tensor of each lane to a reader, unless its device has been sent it already.

    Args:
      links: as they are.
      source: `[L]` int32.
      destination: `[L]` int32, device of the reader.
      request_s: `[L]`.
      move_s: `[L]` duration of the transfer.
      opens: `[L]` bool, whether the tensor is another one than in the call before.
      real: `[L]` bool; where not, nothing is sent.
      native: see `lockstep.run_batch`.

    Returns:
      Arrivals `[L]`, and the links as they are then.
    """
    devices, lanes = links.sent_s.shape
    there = destination.astype(request_s.dtype)
    sent_s = jnp.where(opens[None], -1.0, links.sent_s)
    earlier_s = pick(sent_s, there)
    first_link = jnp.arange(lanes, dtype=source.dtype) * devices**2
    link = first_link + source * devices + destination
    free_s = at(links.free_s, link)
    stays = source == destination
    new_s = jnp.where(stays, request_s, larger(free_s, request_s) + move_s)
    arrival_s = jnp.where(earlier_s >= 0, earlier_s, new_s)
    carried = real & ~stays & (earlier_s < 0)
    return arrival_s, SerialLinks(
        free_s=write(links.free_s, link, jnp.where(carried, new_s, free_s)[:, None], native),
        sent_s=jnp.where(column(devices, there) == there[None], arrival_s[None], sent_s),
    )


def carry_inputs(
    padded: PaddedProblem, placement: chex.Array, native: bool
) -> tuple[chex.Array, SerialLinks]:
    """Moves graph inputs from their homes, at time 0 and in the order of their ids.

    Returns when each task's are there `[L, N + 1]`, and the links after that.
    """
    lanes, rows = placement.shape
    devices, dtype = padded.num_devices, padded.compute_s.dtype
    where = jnp.arange(lanes, dtype=jnp.int32) * rows
    flat = placement.reshape(-1)
    links = SerialLinks(
        free_s=jnp.zeros(lanes * devices**2, dtype),
        sent_s=jnp.full((devices, lanes), -1.0, dtype),
    )

    def one(
        i: chex.Array, carry: tuple[chex.Array, SerialLinks]
    ) -> tuple[chex.Array, SerialLinks]:
        ready_s, links = carry
        read = where + padded.home_reader[i]
        destination = at(flat, read)
        source = jnp.broadcast_to(padded.home_device[i], (lanes,))
        move_s = at(padded.latency_s.reshape(-1), source * devices + destination)
        move_s += padded.home_bytes[i] * at(
            padded.seconds_per_byte.reshape(-1), source * devices + destination
        )
        arrival_s, links = send(
            links,
            source=source,
            destination=destination,
            request_s=jnp.zeros(lanes, dtype),
            move_s=move_s,
            opens=jnp.broadcast_to(padded.home_opens[i], (lanes,)),
            real=jnp.broadcast_to(padded.home_reader[i] < rows - 1, (lanes,)),
            native=native,
        )
        latest_s = larger(at(ready_s, read), arrival_s)
        return write(ready_s, read, latest_s[:, None], native), links

    ready_s = jnp.zeros(lanes * rows, dtype)
    if len(padded.home_reader) > 0:
        count = len(padded.home_reader)
        ready_s, links = jax.lax.fori_loop(0, count, one, (ready_s, links))
    return ready_s.reshape(lanes, rows), links
