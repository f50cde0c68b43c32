"""Why a schedule takes as long as it does, in numbers and in words."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from doppler_jax.reports.tables import format_seconds, format_table
from doppler_jax.simulator.critical_chain import (
    ChainLink,
    ChainSeconds,
    chain_seconds,
    critical_chain,
)
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import makespan_s
from doppler_jax.simulator.validate import validate
from doppler_jax.types import Costs, Schedule, TaskGraph

SHOWN = 30
"""Links of the chain that `str` of an explanation shows: the longest, in the order of time."""


@dataclasses.dataclass(frozen=True)
class ScheduleExplanation:
    """What a schedule kept busy, and what its makespan went on; print it to read it."""

    makespan_s: float
    busy_s: np.ndarray  # [D] of each device
    link_busy_s: np.ndarray  # [D, D] while each link carries at least one thing
    moved_bytes: np.ndarray  # [D, D] over each link
    peak_bytes: np.ndarray  # [D] memory
    capacity_bytes: np.ndarray  # [D]
    chain: tuple[ChainLink, ...]  # first to last
    chain_seconds: ChainSeconds
    names: tuple[str, ...]  # [N] of the tasks
    queue: str | None = None  # that the plan is for, where it was said

    @property
    def utilisation(self) -> np.ndarray:
        """`[D]` share of the makespan for which each device computes."""
        return self.busy_s / (self.makespan_s or 1.0)

    @property
    def link_utilisation(self) -> np.ndarray:
        """`[D, D]` share of the makespan for which each link carries something."""
        return self.link_busy_s / (self.makespan_s or 1.0)

    def __str__(self) -> str:
        queue = "" if self.queue is None else f" under {self.queue!r}"
        return (
            f"makespan {format_seconds(self.makespan_s)}{queue}; {self.moved_bytes.sum():.4g} "
            f"bytes moved\n\n{self._devices()}\n{self.links_text()}{self.chain_text()}"
        )

    def _devices(self) -> str:
        rows = [
            (
                str(d),
                format_seconds(self.busy_s[d]),
                f"{self.utilisation[d]:.0%}",
                f"{self.peak_bytes[d]:.4g}",
                self._capacity(d),
            )
            for d in range(self.busy_s.size)
        ]
        return format_table(("device", "busy", "share", "peak memory (bytes)", "of"), rows)

    def _capacity(self, d: int) -> str:
        if np.isinf(self.capacity_bytes[d]):
            return "unlimited"
        over = ", exceeded" if self.peak_bytes[d] > self.capacity_bytes[d] else ""
        return f"{self.capacity_bytes[d]:.4g}{over}"

    def links_text(self) -> str:
        """Returns a table of the links that carried something, "" if none did."""
        rows = [
            (
                f"{s} to {d}",
                format_seconds(self.link_busy_s[s, d]),
                f"{self.link_utilisation[s, d]:.0%}",
                f"{self.moved_bytes[s, d]:.4g}",
            )
            for s, d in np.argwhere((self.moved_bytes > 0) | (self.link_busy_s > 0)).tolist()
        ]
        return format_table(("link", "busy", "share", "bytes"), rows) + "\n" if rows else ""

    def chain_text(self) -> str:
        """Returns what the makespan went on along the critical chain, and its longest links."""
        length_s = np.array([link.finish_s - link.start_s for link in self.chain])
        shown = np.sort(np.argsort(-length_s, kind="stable")[:SHOWN]).tolist()
        rows = [
            (
                *self.item_and_place(self.chain[j]),
                format_seconds(self.chain[j].start_s),
                format_seconds(length_s[j]),
                self.chain[j].waited_for,
            )
            for j in shown
        ]
        left_out = len(self.chain) - len(shown)
        return (
            f"critical chain: {self.chain_went()}\n\n"
            + format_table(("chain", "device", "start", "takes", "waited for"), rows)
            + (f"and {left_out} shorter ones\n" if left_out else "")
        )

    def chain_went(self) -> str:
        """Returns how many tasks and transfers the chain has, and what its time went on."""
        went = ", ".join(
            f"{name.removesuffix('_s')} {format_seconds(seconds)} "
            f"({seconds / (self.makespan_s or 1.0):.0%})"
            for name, seconds in dataclasses.asdict(self.chain_seconds).items()
        )
        tasks = sum(link.kind == "task" for link in self.chain)
        return f"{tasks} tasks, {len(self.chain) - tasks} transfers: {went}"

    def item_and_place(self, link: ChainLink) -> tuple[str, str]:
        """Returns what a link of the chain is, and where."""
        if link.kind == "task":
            return self.names[link.item], str(link.device)
        where = f"{link.source} to {link.device}"
        return f"tensor {link.item}" if link.item >= 0 else f"graph input {~link.item}", where


def explain_schedule(
    graph: TaskGraph,
    costs: Costs,
    schedule: Schedule,
    *,
    names: Sequence[str] | None = None,
    queue: str | None = None,
) -> ScheduleExplanation:
    """Returns why a schedule takes as long as it does; print it to read it.

    Example:
      >>> graph, costs = dj.from_edge_delays([2.0, 1.0], [(0, 1, 1.0)], num_devices=2)
      >>> schedule = dj.place(graph, costs, method="heft").schedule
      >>> dj.explain_schedule(graph, costs, schedule).makespan_s
      3.0

    Args:
      graph: the task graph, N tasks.
      costs: its costs on D devices: sizes and capacities.
      schedule: of one placement, with its transfers: the oracle's (`simulate_oracle`,
        `Placed.schedule`), or measured.
      names: `[N]` of the tasks; their numbers if not given.
      queue: that the plan is for (`Placed.queue`), if it is to be said.

    Raises:
      ValueError: the schedule is not legal, a transfer is missing, or there is not one name
        per task.
    """
    names = [f"task {v}" for v in range(graph.num_tasks)] if names is None else names
    if len(names) != graph.num_tasks:
        raise ValueError(f"names has {len(names)} entries, expected {graph.num_tasks}")
    validate(graph, schedule)
    shape = (costs.num_devices, costs.num_devices)
    moved_bytes, link_busy_s = np.zeros(shape), np.zeros(shape)
    link = (np.asarray(schedule.transfer_source), np.asarray(schedule.transfer_destination))
    sizes = np.concatenate([costs.tensor_bytes, np.asarray(costs.input_bytes)[::-1]])
    np.add.at(moved_bytes, link, sizes[schedule.transfer_tensor])  # ~i counts from the end
    for s, d in np.unique(np.stack(link, axis=1), axis=0).tolist():
        here = (link[0] == s) & (link[1] == d)
        link_busy_s[s, d] = _covered_s(
            schedule.transfer_start_s[here], schedule.transfer_finish_s[here]
        )
    chain = critical_chain(graph, schedule)
    return ScheduleExplanation(
        makespan_s=makespan_s(schedule),
        busy_s=np.bincount(
            schedule.placement, schedule.finish_s - schedule.start_s, costs.num_devices
        ),
        link_busy_s=link_busy_s,
        moved_bytes=moved_bytes,
        peak_bytes=peak_memory_bytes(graph, costs, schedule),
        capacity_bytes=np.asarray(costs.capacity_bytes, np.float64),
        chain=chain,
        chain_seconds=chain_seconds(chain),
        names=tuple(names),
        queue=queue,
    )


def _covered_s(start_s: np.ndarray, finish_s: np.ndarray) -> float:
    """Returns for how long at least one of the intervals lasts."""
    order = np.argsort(start_s, kind="stable")
    # What earlier intervals, longest reaching, have covered already does not count again.
    reached_s = np.maximum.accumulate(finish_s[order])
    begin_s = np.maximum(start_s[order][1:], reached_s[:-1])
    rest_s = np.maximum(finish_s[order][1:] - begin_s, 0.0)
    return float(reached_s[0] - start_s[order][0] + rest_s.sum())
