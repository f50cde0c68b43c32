"""Two plans for one problem: what is elsewhere, or in another order, and what it is worth."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from doppler_jax.files import PathLike
from doppler_jax.reports.schedules import ScheduleExplanation
from doppler_jax.reports.tables import format_bytes, format_seconds, format_table
from doppler_jax.types import Costs

if TYPE_CHECKING:  # it needs this package
    from doppler_jax.placed import Placed

SHOWN = 15
"""Moved tasks that `str` of a comparison lists: those that take longest."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two plans for one problem; print it to read it.

    Attributes:
      first: a plan.
      second: the other one, its devices renamed where all are alike, so that most tasks stay.
      explained: of each, see `explain_schedule`.
      renamed: `[D]` what each device of the second is called here.
      moved: `[M]` tasks on another device, in the order in which the first starts them.
      reordered: `[R]` tasks that stay, but start after another number of those that stay on
        their device.
    """

    first: "Placed"
    second: "Placed"
    explained: tuple[ScheduleExplanation, ScheduleExplanation]
    renamed: np.ndarray
    moved: np.ndarray
    reordered: np.ndarray

    def __str__(self) -> str:
        return f"{self._verdict()}\n\n{self._table()}\n{self._moves()}"

    def report(self, path: PathLike, title: str = "Comparison") -> None:
        """Writes both plans below each other as a page that opens offline.

        Raises:
          ValueError: Bokeh (extra `report`) is not there, or the file cannot be written.
        """
        from doppler_jax.reports.page import write_report

        panels = [
            (label, plan.schedule)
            for label, plan in zip(self._labels, (self.first, self.second), strict=True)
        ]
        write_report(
            path, self.first.graph, self.first.costs, panels, title=title,
            names=self.explained[0].names, about=str(self),
        )  # fmt: skip

    @property
    def _labels(self) -> tuple[str, str]:
        one, two = self.first.method, self.second.method
        return (one, two) if one != two else (f"{one} (first)", f"{two} (second)")

    def _verdict(self) -> str:
        """Returns which is shorter, and on what its chain spends less."""
        before, after = self.explained
        one, two = self._labels
        spent = {
            name.removesuffix("_s"): getattr(after.chain_seconds, name) - seconds
            for name, seconds in dataclasses.asdict(before.chain_seconds).items()
        }
        change_s = after.makespan_s - before.makespan_s
        if abs(change_s) <= 1e-9 * before.makespan_s:
            return f"{one} and {two} take the same time: {format_seconds(after.makespan_s)}."
        word = "shorter" if change_s < 0 else "longer"
        share = abs(change_s) / (before.makespan_s or 1.0)
        parts = [
            f"{format_seconds(abs(seconds), 3)} {'less' if seconds < 0 else 'more'} {name}"
            for name, seconds in sorted(spent.items(), key=lambda item: item[1] * change_s)[
                ::-1
            ]
            if abs(seconds) > 1e-3 * abs(change_s)
        ]
        return (
            f"{two} is {share:.1%} {word} than {one}, by {format_seconds(abs(change_s))}: "
            f"along the critical chain there is {', '.join(parts)}. Its devices idle "
            f"{format_seconds(_idle_s(after))} together, those of {one} "
            f"{format_seconds(_idle_s(before))}."
        )

    def _table(self) -> str:
        before, after = self.explained
        rows: list[tuple[str, float, float]]
        rows = [("makespan", before.makespan_s, after.makespan_s)]
        rows += [
            (f"chain: {name.removesuffix('_s')}", seconds, getattr(after.chain_seconds, name))
            for name, seconds in dataclasses.asdict(before.chain_seconds).items()
        ]
        rows.append(("devices, together: busy", before.busy_s.sum(), after.busy_s.sum()))
        rows.append(("devices, together: idle", _idle_s(before), _idle_s(after)))
        text = [(name, *map(format_seconds, pair), _change(*pair)) for name, *pair in rows]
        sizes = [("moved between devices", before.moved_bytes.sum(), after.moved_bytes.sum())]
        if self.first.graph.has_bytes:
            sizes.append(
                ("most memory of a device", *(max(e.peak_bytes) for e in (before, after)))
            )
        text += [(name, *map(format_bytes, pair), _change(*pair)) for name, *pair in sizes]
        return format_table(("", *self._labels, "change"), text)

    def _moves(self) -> str:
        before = self.explained[0]
        chain = {link.item for link in before.chain if link.kind == "task"}
        n, on_chain = self.first.graph.num_tasks, len(chain.intersection(self.moved.tolist()))
        text = (
            f"{len(self.moved)} of {n} tasks are on another device, {on_chain} of them in the "
            f"critical chain of {self._labels[0]}; {len(self.reordered)} others start in "
            "another order.\n"
        )
        if (self.renamed != np.arange(len(self.renamed))).any():
            names = ", ".join(f"{d} is called {e}" for d, e in enumerate(self.renamed.tolist()))
            text += f"All devices are alike: of {self._labels[1]}, {names} here.\n"
        one, two = self.first, self.second
        takes_s = (one.schedule.finish_s - one.schedule.start_s)[self.moved]
        shown = self.moved[np.sort(np.argsort(-takes_s, kind="stable")[:SHOWN])].tolist()
        rows = [
            (
                before.names[v],
                f"{one.placement[v]} to {two.placement[v]}",
                format_seconds(one.schedule.start_s[v]),
                format_seconds(two.schedule.start_s[v]),
            )
            for v in shown
        ]
        columns = ("moved, longest first", "device", *(f"start in {x}" for x in self._labels))
        return text + ("\n" + format_table(columns, rows) if rows else "")


def compare(
    first: "Placed", second: "Placed", names: Sequence[str] | None = None
) -> Comparison:
    """Returns what differs between two plans, and why one is faster; print it to read it.

    Example:
      >>> graph, costs = dj.from_edge_delays([2.0, 1.0], [(0, 1, 1.0)], num_devices=2)
      >>> one, other = (dj.place(graph, costs, method=m) for m in ("heft", "round_robin"))
      >>> dj.compare(one, other).moved
      array([1])

    Args:
      first: a plan, as `place` returns it.
      second: another one for the same graph and costs.
      names: `[N]` of the tasks; their numbers if not given.

    Raises:
      ValueError: the plans are of different problems, or there is not one name per task.
    """
    if first.problem != second.problem:
        raise ValueError("the plans are of different graphs, or of different costs")
    renamed = np.arange(first.costs.num_devices)
    if _alike(first.costs) and first.graph.is_resident.all():
        renamed = _name_alike(first.placement, second.placement, len(renamed))
        second = _rename(second, renamed)
    stays = first.placement == second.placement
    start = np.argsort(first.priority)
    return Comparison(
        first=first,
        second=second,
        explained=(first.explain(names), second.explain(names)),
        renamed=renamed,
        moved=start[~stays[start]],
        reordered=np.flatnonzero(stays & (_turn(first, stays) != _turn(second, stays))),
    )


def _alike(costs: Costs) -> bool:
    """Returns whether no device or link differs from another in any number."""
    links = ~np.eye(costs.num_devices, dtype=bool)
    per_device = (costs.capacity_bytes, costs.handling_s, costs.handling_s_per_byte)
    columns = [np.asarray(x) for x in per_device if x is not None]
    columns += [np.asarray(x)[links] for x in (costs.latency_s, costs.seconds_per_byte)]
    columns.append(np.asarray(costs.compute_s).T)
    return all((column == column[:1]).all() for column in columns)


def _name_alike(first: np.ndarray, second: np.ndarray, num_devices: int) -> np.ndarray:
    """Returns names `[D]` for the devices of `second` with which most tasks stay in place."""
    from scipy.optimize import linear_sum_assignment

    shared = np.zeros((num_devices, num_devices))
    np.add.at(shared, (second, first), 1)
    return linear_sum_assignment(shared, maximize=True)[1]


def _rename(placed: "Placed", names: np.ndarray) -> "Placed":
    """Returns the same plan, its devices of other names."""
    old = placed.schedule
    schedule = dataclasses.replace(
        old,
        placement=names[old.placement],
        transfer_source=names[old.transfer_source],
        transfer_destination=names[old.transfer_destination],
    )
    return dataclasses.replace(placed, placement=names[placed.placement], schedule=schedule)


def _turn(placed: "Placed", stays: np.ndarray) -> np.ndarray:
    """Returns how many `[N]` of those that stay start before each on its device."""
    turn = np.zeros(len(stays), np.int64)
    order = np.argsort(placed.priority)
    for d in range(placed.costs.num_devices):
        here = order[(stays & (placed.placement == d))[order]]
        turn[here] = np.arange(len(here))
    return turn


def _idle_s(explained: ScheduleExplanation) -> float:
    return max(explained.makespan_s * explained.busy_s.size - explained.busy_s.sum(), 0.0)


def _change(before: float, after: float) -> str:
    change = f"{after / before - 1:+.1%}" if before else ""
    return "" if change in ("+0.0%", "-0.0%") else change
