"""Placements kept in a folder, so that a request is searched for once: `place(cache=...)`.

A file per request, named by a digest of all that decides its result. What is found there is
not trusted: `place` judges it again, and searches afresh where it is not worth what it says.
"""

import dataclasses
import hashlib
import pathlib
from typing import Any

import chex
import jax
import numpy as np

from doppler_jax.budget import Curve
from doppler_jax.costs.digests import problem_digest, tree_digest
from doppler_jax.files import (
    PathLike,
    check_header,
    parse_json_object,
    read_numbers,
    read_text,
    write_json_atomic,
)
from doppler_jax.objective import Objective
from doppler_jax.training.checkpoint import Policy
from doppler_jax.types import Costs, TaskGraph

FORMAT = "doppler_jax.placement"


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a file holds of a placement."""

    placement: np.ndarray  # [N] int64
    priority: np.ndarray  # [N] int64
    queue: str
    objective_s: float
    lower_bound_s: float
    evaluations: int
    seconds: float
    compile_s: float
    curve: Curve


def request_path(
    folder: PathLike,
    graph: TaskGraph,
    costs: Costs,
    objective: Objective,
    method: str,
    policy: Policy | None,
    key: chex.PRNGKey,
    bounds: dict[str, float | None],
) -> pathlib.Path:
    """Returns the file of a request: its name is a digest of all arguments."""
    parts: list[Any] = [
        FORMAT,
        problem_digest(graph, costs),
        objective,
        method,
        jax.random.key_data(key).tolist(),
        sorted(bounds.items()),
    ]
    if policy is not None:
        parts += [policy.config, tree_digest(policy.params)]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return pathlib.Path(folder) / f"{digest}.json"


def find(path: pathlib.Path, graph: TaskGraph, costs: Costs) -> Kept | None:
    """Returns what a file holds, None where there is none, or a damaged one."""
    if not path.exists():
        return None
    names = {field.name for field in dataclasses.fields(Kept)}
    try:
        data = parse_json_object(path, read_text(path))
        check_header(path, data, FORMAT, names)
        placement = read_numbers(path, data, "placement", integers=True)
        priority = read_numbers(path, data, "priority", integers=True)
        evaluations, seconds, makespan_s = read_numbers(path, data, "curve", ndim=2)
        _check(path, graph, costs, placement, priority)
        numbers = ("objective_s", "lower_bound_s", "seconds", "compile_s")
        return Kept(
            placement=placement,
            priority=priority,
            queue=str(data["queue"]),
            evaluations=int(data["evaluations"]),
            curve=Curve(evaluations.astype(np.int64), seconds, makespan_s),
            **{name: float(data[name]) for name in numbers},
        )
    except (TypeError, ValueError):
        return None


def keep(path: pathlib.Path, kept: Kept) -> None:
    """Writes a file, and its folder if there is none; a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {f.name: getattr(kept, f.name) for f in dataclasses.fields(kept)}
    curve = [kept.curve.evaluations, kept.curve.seconds, kept.curve.makespan_s]
    fields["curve"] = [row.tolist() for row in curve]
    fields["placement"] = kept.placement.tolist()
    fields["priority"] = kept.priority.tolist()
    write_json_atomic(path, {"format": FORMAT, "version": 1, **fields})


def _check(
    path: pathlib.Path,
    graph: TaskGraph,
    costs: Costs,
    placement: np.ndarray,
    priority: np.ndarray,
) -> None:
    n, d = graph.num_tasks, costs.num_devices
    if placement.shape != (n,) or sorted(priority) != list(range(n)):
        raise ValueError(f"{path}: not of {n} tasks")
    if ((placement < 0) | (placement >= d)).any():
        raise ValueError(f"{path}: not of {d} devices")
    if not np.isfinite(costs.compute_s[np.arange(n), placement]).all():
        raise ValueError(f"{path}: a task is on a device that cannot run it")
