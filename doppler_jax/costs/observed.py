"""What an execution's trace says about its parts: seconds of kernels and of transfers."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from doppler_jax.costs.digests import kernel_digests
from doppler_jax.costs.handling import ends_s, handling_seconds
from doppler_jax.types import Costs, Schedule, ShardedProgram


@dataclasses.dataclass
class Observations:
    """Seconds, as often as they were seen.

    A task's are from the moment it could begin (its device idle, its inputs there) to its
    finish, a transfer's from its request to its arrival: what delays either belongs to it, but
    for what devices are known to spend on transfers themselves.
    """

    tasks: dict[tuple[str, int], list[float]]  # by kernel's digest and device
    overheads: dict[int, list[float]]  # by device, from when a task could begin to its start
    transfers: dict[tuple[int, int, int], list[float]]  # by source, destination and bytes

    def to_json(self) -> dict[str, Any]:
        """Returns lists of [key..., seconds] by field, of which `from_json` makes the same."""
        return {
            "tasks": [[*key, seconds] for key, seconds in self.tasks.items()],
            "overheads": [[key, seconds] for key, seconds in self.overheads.items()],
            "transfers": [[*key, seconds] for key, seconds in self.transfers.items()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Observations":
        """Returns the observations that `to_json` gave."""
        return cls(
            tasks={(kernel, device): y for kernel, device, y in data["tasks"]},
            overheads=dict(data["overheads"]),
            transfers={(s, t, b): y for s, t, b, y in data["transfers"]},
        )

    @classmethod
    def merge(cls, parts: Iterable["Observations"]) -> "Observations":
        """Returns all that was seen in some part."""
        whole = cls(defaultdict(list), defaultdict(list), defaultdict(list))
        for part in parts:
            for kind in ("tasks", "overheads", "transfers"):
                for key, seconds in getattr(part, kind).items():
                    getattr(whole, kind)[key].extend(seconds)
        return whole


def observe(
    sharded: ShardedProgram, traces: Iterable[Schedule], costs: Costs | None = None
) -> Observations:
    """Returns what work-conserving executions of a program show.

    Transfers that met another one on their link are left out: how long they waited is the
    simulator's business.

    Args:
      sharded: the program.
      traces: of its executions.
      costs: whose `handling_s` is taken off, of each time half at most; None takes off nothing.
    """
    digests = kernel_digests(sharded.kernels)
    names = [digests[kernel] for kernel in sharded.kernels]
    seen = Observations(defaultdict(list), defaultdict(list), defaultdict(list))
    for trace in traces:
        delay_s = delays_s(sharded, trace)
        places = np.asarray(trace.placement).tolist()
        spent_s = trace.finish_s - trace.start_s + delay_s
        if costs is not None:
            handling_s = handling_seconds(sharded.graph, costs, np.asarray(trace.placement))
            spent_s = np.maximum(spent_s - handling_s, spent_s / 2)
        for v, device in enumerate(places):
            seen.tasks[names[v], device].append(float(spent_s[v]))
            seen.overheads[device].append(float(delay_s[v]))
        _add_transfers(sharded, trace, costs, seen)
    return seen


def delays_s(sharded: ShardedProgram, trace: Schedule) -> np.ndarray:
    """Returns the seconds `[N]` from when each task could begin to when it began."""
    return trace.start_s - np.maximum(_free_s(trace), _ready_s(sharded, trace))


def _free_s(trace: Schedule) -> np.ndarray:
    """Returns when the device of each task `[N]` was done with the one before; 0 at first."""
    free_s = np.zeros(len(trace.placement))
    for device in np.unique(trace.placement):
        tasks = np.flatnonzero(trace.placement == device)
        tasks = tasks[np.argsort(trace.start_s[tasks], kind="stable")]
        free_s[tasks[1:]] = trace.finish_s[tasks[:-1]]
    return free_s


def _ready_s(sharded: ShardedProgram, trace: Schedule) -> np.ndarray:
    """Returns when the last input of each task `[N]` was on its device."""
    graph = sharded.graph
    arrival_s = {
        (int(x), int(d)): float(t)
        for x, d, t in zip(
            trace.transfer_tensor,
            trace.transfer_destination,
            trace.transfer_finish_s,
            strict=True,
        )
    }
    reads = [
        *zip(graph.edge_tensor.tolist(), graph.edge_reader.tolist(), strict=True),
        *zip((~graph.input_edge_input).tolist(), graph.input_edge_reader.tolist(), strict=True),
    ]
    ready_s = np.zeros(graph.num_tasks)
    for x, v in reads:
        made_s = trace.finish_s[graph.tensor_producer[x]] if x >= 0 else 0.0
        ready_s[v] = max(ready_s[v], arrival_s.get((x, int(trace.placement[v])), made_s))
    return ready_s


def _add_transfers(
    sharded: ShardedProgram, trace: Schedule, costs: Costs | None, seen: Observations
) -> None:
    graph = sharded.graph
    tensor = np.asarray(trace.transfer_tensor)
    if not tensor.size:
        return
    is_input = tensor < 0
    made = np.where(is_input, 0, tensor)
    requested_s = np.zeros(len(tensor))
    num_bytes = np.zeros(len(tensor))
    requested_s[~is_input] = trace.finish_s[graph.tensor_producer[made[~is_input]]]
    num_bytes[~is_input] = graph.tensor_bytes[made[~is_input]]
    num_bytes[is_input] = graph.input_bytes[~tensor[is_input]]
    arrived_s = np.asarray(trace.transfer_finish_s)
    link = list(
        zip(trace.transfer_source.tolist(), trace.transfer_destination.tolist(), strict=True)
    )
    for pair in set(link):
        on_link = np.flatnonzero([other == pair for other in link])
        begin, end = requested_s[on_link], arrived_s[on_link]
        met = (begin[:, None] < end[None, :]) & (end[:, None] > begin[None, :])
        for k in on_link[met.sum(1) == 1]:  # itself alone
            seconds = float(arrived_s[k] - requested_s[k])
            if costs is not None:
                ends = ends_s(costs, *pair, num_bytes[k])
                seconds = max(seconds - ends, seconds / 2)
            seen.transfers[*pair, int(num_bytes[k])].append(seconds)
