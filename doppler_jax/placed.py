"""What `place` returns, and the file that it can be kept in."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from doppler_jax.budget import Curve
from doppler_jax.costs.digests import problem_digest
from doppler_jax.files import PathLike, read_fields, read_numbers, write_fields
from doppler_jax.objective import Objective
from doppler_jax.reports.schedules import ScheduleExplanation, explain_schedule
from doppler_jax.reports.tables import format_seconds
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.periods import period_s
from doppler_jax.types import Costs, Plan, Schedule, TaskGraph

FORMAT = "doppler_jax.placement"

PROVEN = 1e-6
"""Relative, by which a makespan may be above the lower bound and still count as proven: solvers
take whole numbers, and round durations down."""

_GIVEN = ("graph", "costs", "names", "schedule")
"""Fields that are not in the file: what it is of, and what follows from that."""

_NUMBERS = ("makespan_s", "objective_s", "lower_bound_s", "seconds")


@dataclasses.dataclass(frozen=True, repr=False)
class Placed:
    """A plan, where and when each task runs, and what it is worth.

    Attributes:
      graph: the task graph, N tasks.
      costs: its costs on D devices.
      placement: `[N]` int64, device of each task.
      priority: `[N]` int64 ranks, least first, producers before readers: the order in which
        tasks start without noise.
      makespan_s: by the float64 oracle, without noise.
      objective_s: what was minimised, by the oracle: under noise its mean or quantile.
      lower_bound_s: no placement has a smaller makespan.
      schedule: the oracle's, without noise.
      queue: that the plan is for, and the schedule's: `in_order` (devices keep to the order),
        `priority` (they start what is ready by it), or `fifo` (what is ready first).
      method: by which it was found.
      objective: what was to be minimised.
      problem: digest of the graph and its costs.
      evaluations: executions simulated by the search.
      seconds: spent, compilation included.
      curve: of the search; of training in float32, but for the last row, the oracle's.
      interrupted: by Ctrl-C; the best until then.
      names: `[N]` of the tasks, where a program was placed.
    """

    graph: TaskGraph
    costs: Costs
    placement: np.ndarray
    priority: np.ndarray
    makespan_s: float
    objective_s: float
    lower_bound_s: float
    schedule: Schedule
    queue: str
    method: str
    objective: Objective
    problem: str
    evaluations: int
    seconds: float
    curve: Curve
    interrupted: bool
    names: tuple[str, ...] | None = None

    @property
    def plan(self) -> Plan:
        """What is executed of it."""
        return Plan(self.placement, self.priority, self.queue)

    @functools.cached_property
    def period_s(self) -> float | None:
        """Seconds that a call adds to a loop that carries its state; None: nothing is carried.

        That is where calls follow each other as closely as the plan's order lets them.
        """
        if not (self.graph.input_maker >= 0).any():
            return None
        links = self.objective.links
        return period_s(self.graph, self.costs, self.placement, self.priority, links=links)

    @property
    def proven(self) -> bool:
        """Whether the makespan meets the lower bound, to a millionth: none is shorter."""
        return self.makespan_s <= self.lower_bound_s * (1 + PROVEN)

    def __repr__(self) -> str:
        devices, counts = np.unique(self.placement, return_counts=True)
        shares = ", ".join(
            f"{c} on {d}" for d, c in zip(devices[:8], counts[:8], strict=True)
        ) + (", ..." if len(devices) > 8 else "")
        return (
            f"Placed({len(self.placement)} tasks by {self.method!r}: {shares}):\n"
            f"  makespan_s: {self.makespan_s:.6g}, "
            + ("optimal" if self.proven else f"at least {self.lower_bound_s:.6g}")
            + f" (queue {self.queue!r})\n"
            + ("" if self.period_s is None else f"  period_s: {self.period_s:.6g}\n")
            + f"  objective_s: {self.objective_s:.6g} ({self.objective})\n"
            f"  search: {self.evaluations} evaluations, {self.seconds:.3g} s"
            + (", interrupted" if self.interrupted else "")
        )

    def save(self, path: PathLike, source: dict[str, str] | None = None) -> None:
        """Writes a JSON file that `load_placed` reads; an old one is replaced in one step.

        Args:
          path: the file.
          source: what else to say of it, such as the names of its graph and cluster.

        Raises:
          ValueError: the file cannot be written.
        """
        curve = [self.curve.evaluations, self.curve.seconds, self.curve.makespan_s]
        names = (*_NUMBERS, "queue", "method", "problem", "evaluations", "interrupted")
        data = {
            "placement": self.placement.tolist(),
            "priority": self.priority.tolist(),
            **{name: getattr(self, name) for name in names},
            "objective": dataclasses.asdict(self.objective),
            "curve": [row.tolist() for row in curve],
            "source": source or {},
        }
        write_fields(path, FORMAT, **data)

    def explain(self, names: Sequence[str] | None = None) -> ScheduleExplanation:
        """Returns why the schedule takes as long as it does; see `explain_schedule`."""
        names = self.names if names is None else names
        return explain_schedule(
            self.graph, self.costs, self.schedule, names=names, queue=self.queue
        )

    def report(
        self, path: PathLike, *, names: Sequence[str] | None = None, title: str = "Plan"
    ) -> None:
        """Writes a page that shows the plan and opens offline; see `reports.page`.

        Args:
          path: of the HTML file; an old one is replaced.
          names: `[N]` of the tasks; by default the program's, if one was placed.
          title: of the page.

        Raises:
          ValueError: there is not one name per task, Bokeh (extra `report`) is not there, or
            the file cannot be written.
        """
        from doppler_jax.reports.page import write_report

        panels = [(self.method, self.schedule)]
        names = self.names if names is None else names
        write_report(
            path, self.graph, self.costs, panels, title=title, names=names, curve=self.curve,
            bound_s=self.lower_bound_s, about=self._about(),
        )  # fmt: skip

    def _about(self) -> str:
        above = self.makespan_s / (self.lower_bound_s or math.inf) - 1
        how_far = "which no plan beats" if self.proven else f"{above:.1%} above the lower bound"
        period = self.period_s
        loop = "" if period is None else f"A loop takes {format_seconds(period)} a step. "
        return (
            f"{self.graph.num_tasks} tasks on {self.costs.num_devices} devices by "
            f"{self.method}, queue {self.queue}: {format_seconds(self.makespan_s)}, {how_far}. "
            f"{loop}{self.evaluations} plans simulated in {format_seconds(self.seconds, 3)}."
        )


def load_placed(path: PathLike, graph: TaskGraph, costs: Costs) -> Placed:
    """Returns the placement in a file that `Placed.save` or `place --output` wrote.

    Example:
      >>> graph, costs = dj.from_edge_delays([2.0, 1.0], [(0, 1, 1.0)], num_devices=2)
      >>> dj.place(graph, costs, method="heft").save("plan.json")
      >>> dj.load_placed("plan.json", graph, costs).makespan_s
      3.0

    Args:
      path: the file.
      graph: the task graph that it is of.
      costs: its costs, the same as then.

    Raises:
      ValueError: the file cannot be read or holds no placement, it is one of another graph or
        other costs, or the oracle does not confirm its makespan. The message starts with the
        path.
    """
    fields = {field.name for field in dataclasses.fields(Placed)}.difference(_GIVEN)
    data = read_fields(path, FORMAT, fields | {"source"})
    placement = read_numbers(path, data, "placement", integers=True)
    priority = read_numbers(path, data, "priority", integers=True)
    curve = read_numbers(path, data, "curve", ndim=2)
    if curve.ndim != 2 or len(curve) != 3:
        raise ValueError(f"{path}: curve has shape {curve.shape}; expected (3, K)")
    if data["problem"] != problem_digest(graph, costs):
        raise ValueError(f"{path}: a placement of another graph, or of other costs")
    if sorted(priority) != list(range(graph.num_tasks)):
        raise ValueError(f"{path}: expected the priorities of {graph.num_tasks} tasks")
    queue = str(data["queue"])
    try:
        objective = Objective(**data["objective"])
        numbers = {name: float(data[name]) for name in _NUMBERS}
        count = int(data["evaluations"])
        schedule = simulate_oracle(
            graph, costs, placement, links=objective.links, queue=queue,
            priority=None if queue == "fifo" else priority,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: a field is not what it should be: {error}") from error
    if not math.isclose(makespan_s(schedule), numbers["makespan_s"], rel_tol=1e-9):
        raise ValueError(
            f"{path}: makespan_s is {numbers['makespan_s']}; the oracle finds "
            f"{makespan_s(schedule)}"
        )
    return Placed(
        **numbers,
        graph=graph,
        costs=costs,
        names=None,
        placement=placement,
        priority=priority,
        schedule=schedule,
        queue=queue,
        method=str(data["method"]),
        objective=objective,
        problem=data["problem"],
        evaluations=count,
        curve=Curve(curve[0].astype(np.int64), *curve[1:]),
        interrupted=bool(data["interrupted"]),
    )
