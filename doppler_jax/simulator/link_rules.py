"""Do links carry what they must, when they must? The part of `validate` about contention."""

import numpy as np

from doppler_jax.simulator.transfer_rules import Transfers
from doppler_jax.types import Schedule


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
        _check_engine(transfers, np.where(brief, _positions(order)[:-1], -1), slack)


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


def _check_engine(transfers: Transfers, phase: np.ndarray, slack: float) -> None:
    """A device sends one at a time and receives one at a time, in the order of requests.

    A transfer may wait only while one of its engines is busy, and another may pass it only
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
