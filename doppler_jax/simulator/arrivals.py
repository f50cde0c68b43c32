"""When what a task has made reaches its readers, for lock-step executions."""

import chex

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator.lanes import at
from doppler_jax.simulator.serial_links import SerialLinks, send


def arrive(
    padded: PaddedProblem,
    transfer_factor: chex.Array | None,
    links: SerialLinks | None,
    *,
    edge: chex.Array,
    source: chex.Array,
    destination: chex.Array,
    request_s: chex.Array,
    native: bool,
) -> tuple[chex.Array, SerialLinks | None]:
    """Sends the tensor of an edge of each lane to the edge's reader.

    Args:
      padded: the problem.
      transfer_factor: `[T * D]` of the transfers' durations, or None.
      links: None under `parallel` links.
      edge: `[L]` int32; the last edge is none.
      source: `[L]` int32 device that made the tensor.
      destination: `[L]` int32 device of the reader.
      request_s: `[L]` when the tensor was made, seconds.
      native: see `lockstep.run_batch`.

    Returns:
      Arrivals `[L]` in seconds, and the links after that.
    """
    link = source * padded.num_devices + destination
    move_s = at(padded.latency_s.reshape(-1), link) + at(padded.edge_bytes, edge) * at(
        padded.seconds_per_byte.reshape(-1), link
    )
    if transfer_factor is not None:
        tensor = at(padded.edge_tensor, edge)
        move_s *= at(transfer_factor, tensor * padded.num_devices + destination)
    if links is None:
        return request_s + move_s, None
    return send(
        links,
        source=source,
        destination=destination,
        request_s=request_s,
        move_s=move_s,
        opens=at(padded.edge_opens, edge),
        real=edge < padded.edge_reader.shape[0] - 1,
        native=native,
    )
