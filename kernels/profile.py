"""What the time of one call went on: devices, waits, transfers, tasks, memory."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.costs.observed import ready_s
from doppler_jax.graphs.bounds import lower_bound_s
from doppler_jax.reports.schedules import ScheduleExplanation, explain_schedule
from doppler_jax.reports.tables import format_seconds, format_table
from doppler_jax.types import Costs, Schedule, TaskGraph

from .trace import CALLER, Handled, WholeCall

SHOWN = 10
"""Tasks that `str` of a profile shows: the slowest."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What one call kept busy and what it waited for; print it to read it."""

    explanation: ScheduleExplanation  # of its trace: busy times, links, critical chain
    lower_bound_s: float  # of the makespan, while tasks take what they took on any device
    task_s: np.ndarray  # [N] of each task
    dispatch_gap_s: np.ndarray  # [N] before each task, see `dispatch_gaps_s`
    idle_ready_s: np.ndarray  # [D] for which each device idled though a task was ready
    handling_s: np.ndarray  # [D] that each device itself spent on transfers
    num_transfers: int
    transfer_s: float  # of all transfers together
    overlapped_s: float  # of that, while the receiving device computed
    peak_bytes: np.ndarray  # [D] most memory held at once, by the engine's own count
    device_names: tuple[str, ...]  # [D]
    whole_call: WholeCall | None  # None: of the trace alone
    traced_s: float  # from the first start to the last finish of the trace
    rest_s: float  # of the whole call, in which nothing of what is known went on

    @property
    def makespan_s(self) -> float:
        return self.explanation.makespan_s

    @property
    def idle_ready_share(self) -> float:
        """Share of the devices' time that they idled though a task was ready for them."""
        total_s = self.makespan_s * len(self.device_names)
        return float(self.idle_ready_s.sum()) / (total_s or 1.0)

    def gap_s(self, quantile: float) -> float:
        """Returns a quantile of the dispatch gaps; 0.5 is the median."""
        return float(np.quantile(self.dispatch_gap_s, quantile)) if self.task_s.size else 0.0

    def __str__(self) -> str:
        explained = self.explanation
        overlap = self.overlapped_s / (self.transfer_s or 1.0)
        return (
            f"makespan {format_seconds(self.makespan_s)}, "
            f"{self.task_s.size} tasks on {len(self.device_names)} devices; with tasks as fast "
            f"as here none below {format_seconds(self.lower_bound_s)}\n"
            f"idle with a ready task: {format_seconds(float(self.idle_ready_s.sum()))} "
            f"({self.idle_ready_share:.1%} of the devices' time); before a task "
            f"{format_seconds(self.gap_s(0.5), 3)} (median), "
            f"{format_seconds(self.gap_s(0.99), 3)} (99th percentile)\n"
            f"transfers: {self.num_transfers}, {explained.moved_bytes.sum():.4g} bytes, "
            f"{format_seconds(self.transfer_s)} together, {overlap:.0%} of it while the "
            f"receiver computed\n{self._call()}\n{self._devices()}\n{explained.links_text()}"
            f"{self._slowest()}\n{explained.chain_text()}"
        )

    def _call(self) -> str:
        if self.whole_call is None:
            return ""
        call_s, spent = self.whole_call.seconds, dict[tuple[str, str], float]()
        for name, device, start_s, finish_s in self.whole_call.chores:
            key = name, "the caller" if device == CALLER else f"{device}"
            spent[key] = spent.get(key, 0.0) + finish_s - start_s
        spent["tasks and transfers", "all"] = self.traced_s
        spent["rest: threads or processes wake", ""] = self.rest_s
        rows = [(*key, format_seconds(s), f"{s / call_s:.1%}") for key, s in spent.items()]
        header = f"call, {format_seconds(call_s)}", "device", "takes", "share"
        return f"\n{format_table(header, rows)}"

    def _devices(self) -> str:
        columns = (
            [f"{d} ({name})" for d, name in enumerate(self.device_names)],
            map(format_seconds, self.explanation.busy_s),
            [f"{share:.0%}" for share in self.explanation.utilisation],
            map(format_seconds, self.idle_ready_s),
            map(format_seconds, self.handling_s),
            [f"{most:.4g}" for most in self.peak_bytes],
        )
        rows = list(zip(*columns, strict=True))
        idle, memory = "idle with a ready task", "peak memory (bytes)"
        return format_table(("device", "busy", "share", idle, "on transfers", memory), rows)

    def _slowest(self) -> str:
        slowest = np.argsort(-self.task_s, kind="stable")[:SHOWN].tolist()
        names, total_s = self.explanation.names, self.task_s.sum() or 1.0
        shares = [(names[v], self.task_s[v]) for v in slowest]
        rows = [(name, format_seconds(s), f"{s / total_s:.1%}") for name, s in shares]
        return format_table(("slowest tasks", "takes", "share of all compute"), rows)


def profile(
    graph: TaskGraph,
    trace: Schedule,
    names: Sequence[str],
    device_names: Sequence[str],
    peak_bytes: ArrayLike,
    handling: Handled | None = None,
    whole_call: WholeCall | None = None,
) -> Profile:
    """Returns what the time of one call went on; print it to read it.

    Args:
      graph: the task graph that ran, N tasks.
      trace: when each task and transfer ran, in seconds.
      names: `[N]` of the tasks.
      device_names: `[D]` of the devices.
      peak_bytes: `[D]` most memory held at once.
      handling: when devices themselves moved tensors, between their tasks; by default never.
      whole_call: when the function was called and could be used, and what it did besides.

    Raises:
      ValueError: the trace is no legal execution of the graph, or names or `peak_bytes`
        are of another length.
    """
    num_devices = len(device_names)
    peaks = np.asarray(peak_bytes, np.float64)
    if peaks.shape != (num_devices,):
        raise ValueError(f"peak_bytes has shape {peaks.shape}, expected ({num_devices},)")
    costs = measured_costs(graph, trace, num_devices)
    explanation = explain_schedule(graph, costs, trace, names=names)
    gap_s = dispatch_gaps_s(graph, trace, handling or [])
    transfer_s = trace.transfer_finish_s - trace.transfer_start_s
    handled = _columns(handling or [])
    began_s, ended_s = _ends(trace)
    return Profile(
        explanation=explanation,
        lower_bound_s=lower_bound_s(graph, costs),
        task_s=trace.finish_s - trace.start_s,
        dispatch_gap_s=gap_s,
        idle_ready_s=np.bincount(trace.placement, gap_s, num_devices),
        handling_s=np.bincount(handled[0].astype(int), handled[2] - handled[1], num_devices),
        num_transfers=transfer_s.size,
        transfer_s=float(transfer_s.sum()),
        overlapped_s=float(_receiver_busy_s(trace).sum()),
        peak_bytes=peaks,
        device_names=tuple(device_names),
        whole_call=whole_call,
        traced_s=ended_s - began_s,
        rest_s=0.0 if whole_call is None else _rest_s(trace, whole_call),
    )


def _ends(trace: Schedule) -> tuple[float, float]:
    """Returns the first start and the last finish; 0 without tasks.

    The first task or transfer can start after 0: a thread wakes late on a busy machine.
    """
    starts_s = np.append(trace.start_s, trace.transfer_start_s)
    return (float(starts_s.min()), float(trace.finish_s.max())) if starts_s.size else (0.0, 0.0)


def _rest_s(trace: Schedule, whole: WholeCall) -> float:
    """Returns for how long there was no chore, and it was not between the trace's ends."""
    at_s, rest_s = whole.start_s, 0.0
    for start_s, finish_s in sorted([_ends(trace), *(chore[2:] for chore in whole.chores)]):
        rest_s += max(0.0, start_s - at_s)
        at_s = max(at_s, finish_s)
    return float(rest_s + max(0.0, whole.finish_s - at_s))


def dispatch_gaps_s(graph: TaskGraph, trace: Schedule, handling: Handled) -> np.ndarray:
    """Returns for how long `[N]` each task's device idled with a ready task before it.

    A task is ready when its inputs are on its device: as their producers there finish, or
    their transfers. The gap before a task lasts from when the device was free and any task
    that it had yet to run was ready until the task starts, less what the device spent on
    transfers meanwhile (`handling`). So the gaps of a device add up to the time for which it
    was not work-conserving, what dispatch takes included.

    The trace is a legal one.
    """
    inputs_s, gap_s = ready_s(graph, trace), np.zeros(graph.num_tasks)
    device, start_s, finish_s = _columns(handling)
    for tasks in _tasks_in_order(trace):
        free_s = np.append(0.0, np.maximum.accumulate(trace.finish_s[tasks])[:-1])
        first_ready_s = np.minimum.accumulate(inputs_s[tasks][::-1])[::-1]
        since_s = np.minimum(np.maximum(free_s, first_ready_s), trace.start_s[tasks])
        mine = device == trace.placement[tasks[0]]
        times_s = start_s[mine], finish_s[mine]
        spent_s = _within(*times_s, trace.start_s[tasks]) - _within(*times_s, since_s)
        gap_s[tasks] = np.maximum(trace.start_s[tasks] - since_s - spent_s, 0.0)
    return gap_s


def _columns(handling: Handled) -> np.ndarray:
    """Returns devices, starts and finishes, `[3, H]`."""
    return np.array(handling, np.float64).reshape(-1, 3).T


def measured_costs(graph: TaskGraph, trace: Schedule, num_devices: int) -> Costs:
    """Returns costs by which every task takes what it took, on any device."""
    task_s = np.asarray(trace.finish_s - trace.start_s, np.float64)
    return Costs(
        compute_s=np.repeat(task_s[:, None], num_devices, axis=1),
        tensor_bytes=graph.tensor_bytes,
        input_bytes=graph.input_bytes,
        latency_s=np.zeros((num_devices, num_devices)),
        seconds_per_byte=np.zeros((num_devices, num_devices)),
        capacity_bytes=np.full(num_devices, np.inf),
    )


def _tasks_in_order(trace: Schedule) -> list[np.ndarray]:
    """Returns the tasks of each device that has any, by start."""
    order = np.lexsort((trace.finish_s, trace.start_s, trace.placement))
    places = trace.placement[order]
    return np.split(order, np.flatnonzero(np.diff(places)) + 1) if order.size else []


def _receiver_busy_s(trace: Schedule) -> np.ndarray:
    """Returns for how long `[X]` the receiving device computed during each transfer."""
    overlap_s = np.zeros(trace.transfer_tensor.size)
    for tasks in _tasks_in_order(trace):
        here = trace.transfer_destination == trace.placement[tasks[0]]
        times_s = trace.start_s[tasks], trace.finish_s[tasks]
        until_s = _within(*times_s, trace.transfer_finish_s[here])
        overlap_s[here] = until_s - _within(*times_s, trace.transfer_start_s[here])
    return overlap_s


def _within(start_s: np.ndarray, finish_s: np.ndarray, at_s: np.ndarray) -> np.ndarray:
    """Returns what of disjoint intervals `[K]`, in their order, lies before each time `[M]`."""
    if not start_s.size:
        return np.zeros_like(at_s)
    times_s = np.stack([start_s, finish_s], axis=1).ravel()
    passed_s = np.repeat(np.cumsum(finish_s - start_s), 2)
    passed_s[::2] = np.append(0.0, passed_s[1:-1:2])
    return np.interp(at_s, times_s, passed_s)
