"""The part of `validate` about transfers.

Are they legal, do links carry what they must when they must, and when is what on its reader's
device?
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.simulator.durations import check_factor
from doppler_jax.types import RESIDENT, Costs, Schedule, TaskGraph


@dataclasses.dataclass(frozen=True)
class Transfers:
    """The X transfer records of a schedule, with what the graph says of them."""

    item: np.ndarray  # [X] tensor, or ~i for graph input i
    source: np.ndarray  # [X]
    destination: np.ndarray  # [X]
    producer: np.ndarray  # [X] task, -1 for graph inputs
    made_s: np.ndarray  # [X] when it could be requested: its producer's finish, 0 for inputs
    start_s: np.ndarray  # [X]
    finish_s: np.ndarray  # [X]

    def describe(self, k: int) -> str:
        """Returns what transfer k is, for messages."""
        x = self.item[k]
        what = f"tensor {x}" if x >= 0 else f"graph input {~x}"
        return (
            f"transfer of {what} from device {self.source[k]} to {self.destination[k]} "
            f"({self.start_s[k]:.9g} to {self.finish_s[k]:.9g} s)"
        )


def check_transfers(graph: TaskGraph, schedule: Schedule, slack: float) -> Transfers:
    """Returns the transfers, each of which moves something, once, to where it is read.

    Raises:
      ValueError: one does not, leaves before its producer finishes, or has impossible times.
    """
    x = schedule.transfer_tensor
    for k in np.flatnonzero((x < -graph.num_inputs) | (x >= graph.num_tensors))[:1]:
        raise ValueError(
            f"transfer_tensor[{k}] is {x[k]}, of {graph.num_tensors} tensors and "
            f"{graph.num_inputs} graph inputs (input i is ~i)"
        )
    is_tensor = x >= 0
    producer = np.full(x.shape, -1)
    producer[is_tensor] = graph.tensor_producer[x[is_tensor]]
    made_s, home = np.zeros(x.shape), np.zeros(x.shape, np.int64)
    made_s[is_tensor] = schedule.finish_s[producer[is_tensor]]
    home[is_tensor] = schedule.placement[producer[is_tensor]]
    home[~is_tensor] = graph.input_home[~x[~is_tensor]]
    transfers = Transfers(
        item=x,
        source=schedule.transfer_source,
        destination=schedule.transfer_destination,
        producer=producer,
        made_s=made_s,
        start_s=schedule.transfer_start_s,
        finish_s=schedule.transfer_finish_s,
    )
    _check_records(transfers, home, _needed(graph, schedule), slack)
    return transfers


def _needed(graph: TaskGraph, schedule: Schedule) -> set[tuple[int, int]]:
    """Returns (item, device) of all that is read."""
    items = np.concatenate([graph.edge_tensor, ~graph.input_edge_input])
    readers = np.concatenate([graph.edge_reader, graph.input_edge_reader])
    places = schedule.placement[readers]
    return set(zip(items.tolist(), places.tolist(), strict=True))


def _check_records(
    transfers: Transfers, home: np.ndarray, needed: set[tuple[int, int]], slack: float
) -> None:
    start, finish, made_s = transfers.start_s, transfers.finish_s, transfers.made_s
    seen = set()
    pairs = zip(transfers.item.tolist(), transfers.destination.tolist(), strict=True)
    for k, pair in enumerate(pairs):
        producer, fault = transfers.producer[k], ""
        origin = f"task {producer}" if producer >= 0 else "its home"
        if pair in seen:
            fault = "happens twice"
        elif home[k] != RESIDENT and transfers.source[k] != home[k]:
            fault = f"does not leave from {origin}, on device {home[k]}"
        elif pair not in needed or pair[1] == transfers.source[k] or home[k] == RESIDENT:
            fault = "is needless: no task there waits for it"
        elif not (np.isfinite(start[k]) and np.isfinite(finish[k])):
            fault = "has a time that is not finite"
        elif finish[k] < start[k]:
            fault = "finishes before it starts"
        elif start[k] < made_s[k] - slack:
            fault = f"starts before {origin} has it, at {made_s[k]:.9g} s"
        if fault:
            raise ValueError(f"{transfers.describe(k)} {fault}")
        seen.add(pair)


def check_transfer_seconds(
    transfers: Transfers, costs: Costs, factor: ArrayLike | None, slack: float
) -> None:
    """Raises unless every transfer takes what its link costs, times its factor `[T, D]`."""
    is_tensor = transfers.item >= 0
    seconds = np.zeros(is_tensor.shape)
    for chosen, sizes, sign, noise in (
        (is_tensor, costs.tensor_bytes, 0, factor),
        (~is_tensor, costs.input_bytes, -1, None),
    ):
        items = transfers.item[chosen] ^ sign  # ~i is i ^ -1
        seconds[chosen] = move_seconds(
            costs, sizes, items, transfers.source[chosen], transfers.destination[chosen], noise
        )
    wrong = np.abs(transfers.start_s + seconds - transfers.finish_s) > slack
    for k in np.flatnonzero(wrong)[:1]:
        raise ValueError(f"{transfers.describe(k)} should take {seconds[k]:.9g} s")


def move_seconds(
    costs: Costs,
    sizes: ArrayLike,
    items: np.ndarray,
    source: np.ndarray,
    destination: np.ndarray,
    factor: ArrayLike | None,
) -> np.ndarray:
    """Returns the seconds of moving each of `items`, of given sizes and factors `[*, D]`."""
    sizes = np.asarray(sizes, np.float64)
    latency = np.asarray(costs.latency_s, np.float64)[source, destination]
    per_byte = np.asarray(costs.seconds_per_byte, np.float64)[source, destination]
    noise = check_factor("transfer_factor", factor, (sizes.size, costs.num_devices))
    return (latency + sizes[items] * per_byte) * noise[items, destination]


def edge_arrivals(
    graph: TaskGraph,
    schedule: Schedule,
    transfers: Transfers,
    costs: Costs | None,
    factor: ArrayLike | None,
) -> np.ndarray:
    """Returns when each edge's tensor is on its reader's device, `[E]` seconds.

    With `costs`, a schedule without any transfer of a tensor has those of `parallel` links.

    Raises:
      ValueError: a transfer is missing.
    """
    senders, readers = task_edges(graph)
    source, destination = schedule.placement[senders], schedule.placement[readers]
    arrival = schedule.finish_s[senders]
    moves = source != destination
    if costs is not None and not (transfers.item >= 0).any():
        wire = move_seconds(
            costs, costs.tensor_bytes, graph.edge_tensor, source, destination, factor
        )
        return np.where(moves, arrival + wire, arrival)
    record = _records(transfers)
    for e in np.flatnonzero(moves):
        pair = (int(graph.edge_tensor[e]), int(destination[e]))
        if pair not in record:
            raise ValueError(
                f"tensor {pair[0]} has no transfer to device {pair[1]}, where task "
                f"{readers[e]} reads it from task {senders[e]}"
            )
        arrival[e] = transfers.finish_s[record[pair]]
    return arrival


def input_arrivals(
    graph: TaskGraph,
    schedule: Schedule,
    transfers: Transfers,
    costs: Costs | None,
    *,
    derive: bool,
) -> np.ndarray:
    """Returns when each graph input is on its reader's device, `[F]` seconds.

    Args:
      graph: the task graph.
      schedule: what is judged.
      transfers: its transfers.
      costs: its costs, or None.
      derive: whether a transfer may be left out; it then starts at 0 and takes what it
        costs, nothing without costs.

    Raises:
      ValueError: a transfer is missing.
    """
    inputs, readers = graph.input_edge_input, graph.input_edge_reader
    home, device = graph.input_home[inputs], schedule.placement[readers]
    moves = (home != RESIDENT) & (home != device)
    arrival, record = np.zeros(inputs.size), _records(transfers)
    if costs is not None:
        source = np.where(moves, home, device)
        wire = move_seconds(costs, costs.input_bytes, inputs, source, device, None)
        arrival = np.where(moves, wire, 0.0)
    for f in np.flatnonzero(moves):
        pair = (~int(inputs[f]), int(device[f]))
        if pair in record:
            arrival[f] = transfers.finish_s[record[pair]]
        elif not derive:
            raise ValueError(
                f"graph input {inputs[f]} has no transfer to device {device[f]}, where task "
                f"{readers[f]} reads it"
            )
    return arrival


def _records(transfers: Transfers) -> dict[tuple[int, int], int]:
    pairs = zip(transfers.item.tolist(), transfers.destination.tolist(), strict=True)
    return {pair: k for k, pair in enumerate(pairs)}


def check_links(
    links: str, transfers: Transfers, schedule: Schedule, order: np.ndarray, slack: float
) -> None:
    """Raises if a transfer starts at another time than its links allow and demand.

    Args:
      links: `parallel`, `serial` or `duplex`.
      transfers: X legal ones.
      schedule: whose they are.
      order: `[N]` its tasks by start (`decision_order`).
      slack: seconds by which times may differ.

    Raises:
      ValueError: naming the transfer and the time.
    """
    if links == "parallel":
        _check_parallel(transfers, slack)
    elif links == "serial":
        _check_serial(transfers, order, slack)
    else:
        brief = schedule.start_s == schedule.finish_s
        _check_duplex(transfers, np.where(brief, _positions(order)[:-1], -1), slack)


def _check_parallel(transfers: Transfers, slack: float) -> None:
    for k in np.flatnonzero(transfers.start_s > transfers.made_s + slack)[:1]:
        raise ValueError(
            f"{transfers.describe(k)} should start at once, at {transfers.made_s[k]:.9g} s"
        )


def _check_serial(transfers: Transfers, order: np.ndarray, slack: float) -> None:
    """On each ordered pair one at a time: inputs by id, then tensors as their producers ran."""
    turn = _positions(order)[transfers.producer]
    link, free_s = None, 0.0
    for k in np.lexsort(
        (_ids(transfers), turn, transfers.destination, transfers.source)
    ).tolist():
        if link != (link := (transfers.source[k], transfers.destination[k])):
            free_s = 0.0
        due_s = max(transfers.made_s[k], free_s)
        if abs(transfers.start_s[k] - due_s) > slack:
            raise ValueError(f"{transfers.describe(k)} should start at {due_s:.9g} s")
        free_s = transfers.finish_s[k]


def _check_duplex(transfers: Transfers, phase: np.ndarray, slack: float) -> None:
    """A device sends one at a time and receives one at a time, in the order of requests.

    A transfer may wait only while one of its ports is busy, and another may pass it only
    if one was busy when the other started, judged on the schedule's own times exactly.
    `phase` `[N]` is a zero-length task's position in the order of starts, -1 for others: at
    one instant, transfers start before such a task runs and requests others.
    """
    start, finish = transfers.start_s, transfers.finish_s
    keys = (transfers.destination, _ids(transfers), transfers.item >= 0, transfers.made_s)
    turn = np.empty(start.size, np.int64)
    turn[np.lexsort(keys)] = np.arange(start.size)
    requested = np.append(phase, -1)[transfers.producer]
    started = np.where(start == transfers.made_s, requested, -1)
    for side, device in (("sends", transfers.source), ("receives", transfers.destination)):
        order = np.lexsort((turn, started, start, device))
        before, after = order[:-1], order[1:]
        overlap = (device[before] == device[after]) & (start[after] < finish[before] - slack)
        for i in np.flatnonzero(overlap)[:1]:
            raise ValueError(
                f"device {device[before[i]]} {side} two things at once: "
                f"{transfers.describe(before[i])} and {transfers.describe(after[i])}"
            )
    for k in np.flatnonzero(start > transfers.made_s + slack).tolist():
        shares = transfers.source == transfers.source[k]
        shares |= transfers.destination == transfers.destination[k]
        shares[k] = False
        rivals = np.flatnonzero(shares)
        _check_gaps(transfers, k, rivals, slack)
        _check_passing(transfers, k, rivals, turn, requested, started)


def _check_gaps(transfers: Transfers, k: int, rivals: np.ndarray, slack: float) -> None:
    """Raises if transfer k waits while none of its rivals is under way."""
    busy_s = transfers.made_s[k]
    for r in rivals[np.argsort(transfers.start_s[rivals])]:
        if min(transfers.start_s[r], transfers.start_s[k]) > busy_s + slack:
            break
        busy_s = max(busy_s, transfers.finish_s[r])
    if transfers.start_s[k] > busy_s + slack:
        raise ValueError(f"{transfers.describe(k)} waits though it could at {busy_s:.9g} s")


def _check_passing(
    transfers: Transfers,
    k: int,
    rivals: np.ndarray,
    turn: np.ndarray,
    requested: np.ndarray,
    started: np.ndarray,
) -> None:
    """Raises if a rival of later turn starts while transfer k waits and could start.

    `requested` and `started` `[X]` are the phases of the instants in which each was.
    """
    start, finish, made_s = transfers.start_s, transfers.finish_s, transfers.made_s[k]
    is_waiting = start[rivals] > made_s
    is_waiting |= (start[rivals] == made_s) & (started[rivals] >= requested[k])
    passes = is_waiting & (start[rivals] < start[k]) & (turn[rivals] > turn[k])
    for a in rivals[passes].tolist():
        others = rivals[rivals != a]
        earlier = (started[others] <= started[a]) & (turn[others] < turn[k])
        if start[a] == made_s:
            earlier |= started[others] < requested[k]
        earlier &= start[others] == start[a]
        earlier |= start[others] < start[a]
        if not (earlier & (finish[others] > start[a])).any():
            raise ValueError(f"{transfers.describe(a)} goes before {transfers.describe(k)}")


def _positions(order: np.ndarray) -> np.ndarray:
    """Returns each task's position `[N + 1]` in the order; -1 at the end, for no task."""
    position = np.full(order.size + 1, -1)
    position[order] = np.arange(order.size)
    return position


def _ids(transfers: Transfers) -> np.ndarray:
    return np.where(transfers.item >= 0, transfers.item, ~transfers.item)
