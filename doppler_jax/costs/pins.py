"""Where tasks may run, by patterns of their names: pins, and groups that stay together."""

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from doppler_jax.types import Costs, ShardedProgram, TaskGraph

Pins = Mapping[str, int | Sequence[int]]
"""Devices, one or several, by a pattern of the tasks that run there alone."""

Together = Sequence[str | Sequence[str]]
"""Patterns, one or several, of tasks that run on one device, whichever that is."""


def pin(graph: TaskGraph | ShardedProgram, costs: Costs, pins: Pins) -> Costs:
    """Returns costs by which tasks of some names run on some devices alone.

    Example:
      >>> graph, costs = dj.from_edge_delays([2.0, 1.0], [(0, 1, 1.0)], num_devices=2)
      >>> dj.pin(graph, costs, {"1": 1}).compute_s
      array([[ 2.,  2.],
             [inf,  1.]])

    Args:
      graph: the program, whose names count; a bare graph's tasks are called by their ids.
      costs: its costs, `compute_s` `[N, D]`; what is returned has inf there elsewhere.
      pins: a device, or several, by pattern (as in `fnmatch`): of a task's whole name, or of a
        scope that it is in. `{"embed": 0, "*mlp*": (1, 2)}`. A task that several patterns fit
        is held to all of them.

    Raises:
      ValueError: a pattern fits no task, a device is out of range, or a task is left with no
        device that can run it.
    """
    names, num_devices = task_names(graph), costs.num_devices
    compute_s = np.array(costs.compute_s, np.float64)
    for pattern, chosen in pins.items():
        devices = np.atleast_1d(np.asarray(chosen))
        is_known = np.isin(devices, np.arange(num_devices))
        if devices.dtype.kind not in "iu" or not devices.size or not is_known.all():
            raise ValueError(
                f"pin[{pattern!r}] is {chosen!r}; expected devices from 0 to {num_devices - 1}"
            )
        tasks = find_tasks(names, pattern, "pin")
        compute_s[np.ix_(tasks, np.setdiff1d(np.arange(num_devices), devices))] = np.inf
        for v in tasks[np.isinf(compute_s[tasks]).all(axis=1)][:1]:
            able = np.flatnonzero(np.isfinite(costs.compute_s[v])).tolist()
            raise ValueError(
                f"pin[{pattern!r}] is {chosen!r}, which leaves no device for task {v} "
                f"({names[v]}): without pins {able} can run it"
            )
    return dataclasses.replace(costs, compute_s=compute_s)


def find_groups(
    graph: TaskGraph | ShardedProgram, costs: Costs, together: Together
) -> list[np.ndarray]:
    """Returns the tasks of each group, disjoint: groups that share a task are one.

    Raises:
      ValueError: a pattern fits no task, an entry has none, or no device can run all tasks of
        a group.
    """
    names = task_names(graph)
    groups: list[np.ndarray] = []
    for entry in [together] if isinstance(together, str) else together:
        patterns = [entry] if isinstance(entry, str) else list(entry)
        if not patterns:
            raise ValueError("together has an entry without patterns; expected one or several")
        found = [find_tasks(names, pattern, "together") for pattern in patterns]
        joined = [group for group in groups if np.isin(group, np.concatenate(found)).any()]
        groups = [group for group in groups if not any(group is other for other in joined)]
        groups.append(np.unique(np.concatenate([*found, *joined])))
    for group in groups:
        if not np.isfinite(costs.compute_s[group]).all(axis=0).any():
            some = ", ".join(names[v] for v in group[:3].tolist())
            raise ValueError(
                f"together: no device can run all {len(group)} tasks of a group ({some}, ...)"
            )
    return groups


def task_names(graph: TaskGraph | ShardedProgram) -> Sequence[str]:
    """Returns what tasks are called: a program's by name, those of a bare graph by id."""
    if isinstance(graph, ShardedProgram):
        return graph.names
    return tuple(map(str, range(graph.num_tasks)))


def find_tasks(names: Sequence[str], pattern: str, what: str) -> np.ndarray:
    """Returns the tasks that a pattern fits, by name or by a scope that they are in.

    Raises:
      ValueError: there are none; the message has the nearest names.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"{what} names {pattern!r}; expected a pattern, such as '*embed*'")
    scopes = {scope for name in names for scope in _scopes(name)}
    fitting = {scope for scope in scopes if scope == pattern or fnmatchcase(scope, pattern)}
    tasks = [v for v, name in enumerate(names) if not fitting.isdisjoint(_scopes(name))]
    if not tasks:
        near = difflib.get_close_matches(pattern.strip("*"), sorted(scopes), 3, 0.0)
        raise ValueError(
            f"{what} names {pattern!r}, which fits no task; the nearest are: {', '.join(near)}"
        )
    return np.array(tasks)


def _scopes(name: str) -> Iterable[str]:
    """Returns "a", "a.b" and "a.b.c[0,1]" of the last."""
    return itertools.accumulate(name.split("."), "{}.{}".format)
