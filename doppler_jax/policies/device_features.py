"""What PLC is told about putting a task on each device: one row of a table a feature.

To add one, insert a row into `DEVICE_FEATURES` after the last of its set, count
`FEATURE_VERSION` (`features.py`) up, add it to the plain loops of tests/policies/reference.py,
and train the base policy anew (`make pretrain`): older checkpoints are
refused, that of the default method of `place` among them.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property

import jax.numpy as jnp
from chex import Array

from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.list_schedule import ListSchedule

SAME = 1e-3
"""Units of time that two finishes may differ by and be called the same."""


class Choice:
    """A task before every device, after what is placed: what features are made of.

    Everything is computed when it is first asked for, so that a policy pays for the features
    of its own set alone. Points in time count from the earliest possible start over all
    devices; times are seconds.
    """

    def __init__(self, problem: PolicyInputs, state: ListSchedule, task: Array) -> None:
        """Takes the problem, the schedule so far and the task `[]` to be placed."""
        self.problem, self.state, self.task = problem, state, task
        self.padded = problem.padded
        self.producers = self.padded.pred_task[task]  # [P]
        self.compute_s = self.padded.compute_s[task]  # [D]
        self.allowed = jnp.isfinite(self.compute_s)

    @cached_property
    def source(self) -> Array:
        """Device of each producer, `[P]`; D for padding."""
        return self.state.device[self.producers]

    @cached_property
    def on(self) -> Array:
        """Whether each producer is on each device, `[P, D]`."""
        return self.source[:, None] == jnp.arange(self.padded.num_devices)[None]

    @cached_property
    def real(self) -> Array:
        """Which producers are no padding, `[P, 1]`."""
        return (self.producers != self.padded.padded_tasks)[:, None]

    @cached_property
    def move_s(self) -> Array:
        """Transfer time of each input to each device, `[P, D]`."""
        there = jnp.minimum(self.source, self.padded.num_devices - 1)
        latency_s, seconds_per_byte = self.padded.links
        num_bytes = self.padded.pred_bytes[self.task][:, None]
        return latency_s[there] + (num_bytes * seconds_per_byte[there])

    @cached_property
    def est_s(self) -> Array:
        """Earliest start on each device, `[D]`; inf where it cannot run the task."""
        finish_s = self.state.finish_s[self.producers][:, None]
        arrival_s = jnp.where(self.real, finish_s + self.move_s, 0.0).max(0)
        arrival_s = jnp.maximum(arrival_s, self.padded.input_ready_s[self.task])
        return jnp.where(self.allowed, jnp.maximum(self.state.free_s, arrival_s), jnp.inf)

    @cached_property
    def late_s(self) -> Array:
        """Finish after the earliest possible one, `[D]`."""
        finish_s = self.est_s + self.compute_s
        return jnp.where(self.allowed, finish_s - finish_s.min(), 0.0)

    @cached_property
    def affinity_s(self) -> Array:
        """Transfer time of the other inputs of the task's readers that are there, `[D]`."""
        return self.state.near_s[self.padded.succ_task[self.task]].sum(0)

    @cached_property
    def related(self) -> Array:
        """The share of the task's relatives that is there, `[D]`."""
        devices = jnp.arange(self.padded.num_devices)[None]
        there = self.state.device[self.problem.relative_task[self.task]][:, None] == devices
        weight = self.problem.relative_weight[self.task][:, None]
        return jnp.where(there, weight, 0.0).sum(0)

    def where_allowed(self, times_s: Array) -> Array:
        """Returns times `[D]`, 0 where the task cannot run."""
        return jnp.where(self.allowed, times_s, 0.0)


def _load_s(choice: Choice) -> Array:
    load_s = choice.state.load_s
    return load_s - jnp.where(choice.allowed, load_s, jnp.inf).min()


def _input_compute_s(choice: Choice) -> Array:
    # The producers' compute where they run; 0 instead of inf elsewhere.
    return jnp.where(choice.on, choice.padded.compute_s[choice.producers], 0.0).sum(0)


def _first_start_s(choice: Choice) -> Array:
    start_s = choice.state.start_s[choice.producers][:, None]
    first_s = jnp.where(choice.on, start_s, jnp.inf).min(0)
    return jnp.where(choice.on.any(0), first_s - choice.est_s.min(), 0.0)


def _last_end_s(choice: Choice) -> Array:
    finish_s = choice.state.finish_s[choice.producers][:, None]
    last_s = jnp.where(choice.on, finish_s, -jnp.inf).max(0)
    return jnp.where(choice.on.any(0), last_s - choice.est_s.min(), 0.0)


def _idle_s(choice: Choice) -> Array:
    return choice.where_allowed(choice.est_s - choice.state.free_s)


def _is_first(choice: Choice) -> Array:
    return choice.late_s <= SAME * choice.problem.unit_s


def _related_of_placed(choice: Choice) -> Array:
    return choice.related / jnp.maximum(choice.related.sum(), 1e-6)


@dataclasses.dataclass(frozen=True)
class DeviceFeature:
    """A row of the table."""

    name: str
    since: str  # the smallest of `FEATURE_SETS` that has it; larger ones do, too
    of: Callable[[Choice], Array]  # `[D]`
    is_time: bool = True  # then it is scaled to units and compressed


FEATURE_SETS = ("paper", "coparent", "general")
"""Sets of device features, each the start of the next; `position` is as `coparent` here."""

DEVICE_FEATURES = (
    DeviceFeature("compute placed there", "paper", _load_s),
    DeviceFeature("compute of the inputs there", "paper", _input_compute_s),
    DeviceFeature("earliest start of the inputs there", "paper", _first_start_s),
    DeviceFeature("latest end of the inputs there", "paper", _last_end_s),
    DeviceFeature(
        "earliest start", "paper", lambda c: c.where_allowed(c.est_s - c.est_s.min())
    ),
    DeviceFeature("compute", "paper", lambda c: c.where_allowed(c.compute_s)),
    DeviceFeature("other inputs of its readers there", "coparent", lambda c: c.affinity_s),
    DeviceFeature("has such inputs", "coparent", lambda c: c.affinity_s > 0, is_time=False),
    DeviceFeature("late finish", "general", lambda c: c.late_s),
    DeviceFeature("is the earliest finish", "general", _is_first, is_time=False),
    DeviceFeature("idle time before it", "general", _idle_s),
    DeviceFeature(
        "inputs to be moved there", "general", lambda c: jnp.where(c.real, c.move_s, 0.0).sum(0)
    ),
    DeviceFeature("relatives there", "general", lambda c: c.related, is_time=False),
    DeviceFeature("placed relatives there", "general", _related_of_placed, is_time=False),
)
"""All device features, those of a smaller set first."""


def count_features(features: str) -> int:
    """Returns how many of `DEVICE_FEATURES` a policy's set of features has."""
    size = FEATURE_SETS.index("coparent" if features == "position" else features)
    return sum(FEATURE_SETS.index(row.since) <= size for row in DEVICE_FEATURES)


def column(name: str) -> int:
    """Returns the position of a feature among the device features."""
    return [row.name for row in DEVICE_FEATURES].index(name)


def device_features(choice: Choice, count: int = len(DEVICE_FEATURES)) -> Array:
    """Returns the first `count` features of putting a task on each device, `[D, count]`.

    Times are in the problem's units, compressed by a signed logarithm.
    """
    columns = []
    for row in DEVICE_FEATURES[:count]:
        values = row.of(choice).astype(jnp.float32)
        if row.is_time:
            units = values / choice.problem.unit_s
            values = jnp.sign(units) * jnp.log1p(jnp.abs(units))
        columns.append(values)
    return jnp.stack(columns, axis=-1)
