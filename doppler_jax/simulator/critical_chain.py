"""Why a schedule takes as long as it does: the chain of waits that ends with its last task."""

import dataclasses
import itertools

import numpy as np

from doppler_jax.simulator.activities import list_activities, list_waits
from doppler_jax.types import Schedule, TaskGraph


@dataclasses.dataclass(frozen=True)
class ChainLink:
    """One task or transfer of the chain, and what its start waited for."""

    kind: str  # "task" or "transfer"
    item: int  # task; tensor of a transfer, or ~i for graph input i
    source: int  # device that a transfer leaves; a task's own
    device: int  # where it runs, or arrives
    start_s: float
    finish_s: float
    waited_for: (
        str  # the one before as its "input", or to free its "device" or "link"; "nothing"
    )
    ready_s: float  # when its last input was there


@dataclasses.dataclass(frozen=True)
class ChainSeconds:
    """What the makespan went on, along the chain; the four add up to it."""

    compute_s: float  # tasks
    transfer_s: float  # transfers
    queueing_s: float  # tasks and transfers while the next of the chain was ready behind them
    idle_s: float  # nothing that the schedule shows; 0 in simulated ones


def critical_chain(graph: TaskGraph, schedule: Schedule) -> tuple[ChainLink, ...]:
    """Returns the tasks and transfers that determine the makespan, first to last.

    From the task that finishes last (the smallest id of those) the chain goes back to what
    its start waited for, until one starts at 0: a task's latest input, or, if the
    device was busy after that had arrived, the task that kept it busy; a transfer's producer,
    or the transfer that kept its link or port busy. Of inputs that arrive together that
    of smallest id counts. In a simulated schedule each starts as the one before finishes.
    What neither explains (overhead of a measured run, a barrier) is a gap.

    Args:
      graph: the task graph.
      schedule: legal, with its transfers.

    Returns:
      The chain; empty without tasks, or if a task never finishes.

    Raises:
      ValueError: a transfer is missing.
    """
    finish_s = np.asarray(schedule.finish_s, np.float64)
    if not finish_s.size or not np.isfinite(finish_s).all():
        return ()
    walk = _Walk(graph, schedule)
    node: int | None = int(np.argmax(finish_s))
    chain = []
    while node is not None:
        link, node = walk.explain(node)
        chain.append(link)
    return tuple(reversed(chain))


def chain_seconds(chain: tuple[ChainLink, ...]) -> ChainSeconds:
    """Returns what the time of a chain, from 0 to its last finish, went on.

    While a link runs it computes or transfers until the next of the chain is ready, and
    from then on keeps that one waiting, which is queueing.
    """
    spent = {"task": 0.0, "transfer": 0.0}
    queueing_s = idle_s = now = 0.0
    for link, after in itertools.zip_longest(chain, chain[1:]):
        idle_s += max(link.start_s - now, 0.0)
        end_s = link.finish_s
        if after is not None and after.waited_for in ("device", "link"):
            end_s = min(max(after.ready_s, link.start_s), link.finish_s)
        spent[link.kind] += end_s - link.start_s
        queueing_s += link.finish_s - end_s
        now = link.finish_s
    return ChainSeconds(spent["task"], spent["transfer"], queueing_s, idle_s)


class _Walk:
    """Finds what the start of each activity waited for."""

    def __init__(self, graph: TaskGraph, schedule: Schedule) -> None:
        self.done = list_activities(schedule)
        self.needs: list[list[int]] = [[] for _ in self.done.item]
        for k, cause in zip(*list_waits(graph, self.done, need_inputs=False), strict=True):
            self.needs[k].append(int(cause))

    def explain(self, node: int) -> tuple[ChainLink, int | None]:
        """Returns the activity as a link of the chain, and the one before it."""
        done, is_task = self.done, node < self.done.num_tasks
        needs = sorted(self.needs[node])
        cause: int | None = max(needs, key=lambda u: done.finish_s[u], default=None)
        ready_s = 0.0 if cause is None else float(done.finish_s[cause])
        waited_for = "input"
        holder = self._holder(node)
        if holder is not None and done.finish_s[holder] > ready_s:
            cause, waited_for = holder, "device" if is_task else "link"
        if cause is None or done.start_s[node] <= 0:
            cause, waited_for = None, "nothing"
        columns = ("item", "source", "device", "start_s", "finish_s")
        link = ChainLink(
            kind="task" if is_task else "transfer",
            **{name: getattr(done, name)[node].item() for name in columns},
            waited_for=waited_for,
            ready_s=ready_s,
        )
        return link, cause

    def _holder(self, node: int) -> int | None:
        """Returns what last held, and gave up, the device or the link of an activity."""
        done, n, now = self.done, self.done.num_tasks, self.done.start_s[node]
        kind = slice(0, n) if node < n else slice(n, None)
        shares = (done.source[kind] == done.source[node]) | (
            done.device[kind] == done.device[node]
        )
        sharing = np.flatnonzero(shares) + kind.start
        start_s, finish_s = done.start_s[sharing], done.finish_s[sharing]
        # What takes no time holds nothing.
        gone = (start_s < finish_s) & (finish_s <= now)
        last_s = finish_s[gone].max(initial=-np.inf)
        if node < n and last_s < now:
            # Under `in_order` a task may wait for one that takes no time but comes first. It is
            # one that an input made wait until now: the node's own inputs were there earlier.
            for u in sharing[(start_s == now) & (finish_s == now)].tolist():
                if u != node and (done.finish_s[self.needs[u]] == now).any():
                    return int(u)
        last = sharing[gone & (finish_s == last_s)]
        both = (done.source[last] == done.source[node]) & (
            done.device[last] == done.device[node]
        )
        return max(zip(both.tolist(), last.tolist(), strict=True), default=(False, None))[1]
