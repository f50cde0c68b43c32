"""Why a schedule takes as long as it does: the chain of waits that ends with its last task."""

import dataclasses
import itertools

import numpy as np

from doppler_jax.graphs.build import task_edges
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
    """Finds what each start waited for. Nodes are tasks, then transfers from N on."""

    def __init__(self, graph: TaskGraph, schedule: Schedule) -> None:
        n = graph.num_tasks
        self.num_tasks = n
        self.device = np.concatenate([schedule.placement, schedule.transfer_destination])
        self.source = np.concatenate([schedule.placement, schedule.transfer_source])
        self.start_s = np.concatenate([schedule.start_s, schedule.transfer_start_s])
        self.finish_s = np.concatenate([schedule.finish_s, schedule.transfer_finish_s])
        self.item = np.concatenate([np.arange(n), schedule.transfer_tensor])
        self.needs: list[list[int]] = [[] for _ in self.item]
        carrier: dict[tuple[int, int], int] = {}
        for k in range(n, self.item.size):
            x = int(self.item[k])
            carrier[x, int(self.device[k])] = k
            if x >= 0:
                self.needs[k].append(int(graph.tensor_producer[x]))
        senders, readers = task_edges(graph)
        for x, u, v in zip(graph.edge_tensor.tolist(), senders, readers, strict=True):
            here = int(self.device[v])
            local = self.device[u] == here
            if not local and (x, here) not in carrier:
                raise ValueError(f"the schedule has no transfer of tensor {x} to device {here}")
            self.needs[v].append(int(u) if local else carrier[x, here])
        for i, v in zip(graph.input_edge_input.tolist(), graph.input_edge_reader, strict=True):
            if (~i, int(self.device[v])) in carrier:
                self.needs[v].append(carrier[~i, int(self.device[v])])

    def explain(self, node: int) -> tuple[ChainLink, int | None]:
        """Returns the node as a link of the chain, and the node before it."""
        is_task = node < self.num_tasks
        needs = sorted(self.needs[node])
        cause: int | None = max(needs, key=lambda u: self.finish_s[u], default=None)
        ready_s = 0.0 if cause is None else float(self.finish_s[cause])
        waited_for = "input"
        holder = self._holder(node)
        if holder is not None and self.finish_s[holder] > ready_s:
            cause, waited_for = holder, "device" if is_task else "link"
        if cause is None or self.start_s[node] <= 0:
            cause, waited_for = None, "nothing"
        link = ChainLink(
            kind="task" if is_task else "transfer",
            item=int(self.item[node]),
            source=int(self.source[node]),
            device=int(self.device[node]),
            start_s=float(self.start_s[node]),
            finish_s=float(self.finish_s[node]),
            waited_for=waited_for,
            ready_s=ready_s,
        )
        return link, cause

    def _holder(self, node: int) -> int | None:
        """Returns what last held, and gave up, the device or the link of a node."""
        n = self.num_tasks
        shares = self.device == self.device[node]
        if node < n:
            shares[n:] = False
        else:
            shares |= self.source == self.source[node]
            shares[:n] = False
        shares &= (self.start_s < self.start_s[node]) & (self.finish_s <= self.start_s[node])
        shares &= self.start_s < self.finish_s  # what takes no time holds nothing
        candidates = np.flatnonzero(shares)
        if node < n and not (self.finish_s[candidates] == self.start_s[node]).any():
            turn = self._turn(node)
            candidates = candidates if turn is None else np.array([turn])
        if not candidates.size:
            return None
        both = (self.device == self.device[node]) & (self.source == self.source[node])
        order = np.lexsort((both[candidates], self.finish_s[candidates]))
        return int(candidates[order[-1]])

    def _turn(self, node: int) -> int | None:
        """Returns the task without length, here and now, whose turn it was before the node's.

        Under `in_order` a task may wait for one that takes no time but came first in order.
        It is one that an input made wait until now: the node's own inputs were there earlier.
        """
        now = self.start_s[node]
        brief = (self.device == self.device[node]) & (self.start_s == now)
        brief &= self.finish_s == now
        brief[self.num_tasks :] = brief[node] = False
        for u in np.flatnonzero(brief).tolist():
            if any(self.finish_s[k] == now for k in self.needs[u]):
                return int(u)
        return None
