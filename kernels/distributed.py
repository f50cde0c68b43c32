"""The front door: a function whose calls run where they end soonest, planned at its first.

A plan has to beat what its user has without us, in whole calls: `jax.jit` of the function.
"""

import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import chex
import jax
import numpy as np

from doppler_jax.costs.pins import Pins, Together
from doppler_jax.files import PathLike
from doppler_jax.methods.registry import DEFAULT_METHOD, find_method
from doppler_jax.methods.request import Method
from doppler_jax.objective import Objective
from doppler_jax.programs.arguments import Carry, Resident
from doppler_jax.programs.blocks import array_aval, leaf_aval
from doppler_jax.reports.page import write_report
from doppler_jax.types import Plan

from .comparing import Compared, compare_calls, fastest
from .devices import Devices, Options
from .drift import Drift
from .loop import Loop
from .placed import PlacedFunction, as_devices, load
from .planning import Lowered, Settings, lower
from .profile import Profile, measured_costs
from .rivals import ShardedJit, jit_rivals, sharded_jits

PLANNING = 0.5
"""Share of the budget for planning; the rest is for comparing."""

TRYING = 0.4
"""Share of that in which ways to shard are tried."""


@dataclasses.dataclass(frozen=True)
class _Choice:
    """What calls of one sort run, and why."""

    run: Callable[..., Any]
    compared: Compared | None = None
    lowered: Lowered | None = None

    @functools.cached_property
    def is_jit(self) -> bool:
        """Whether it takes tracers, and looks at shapes itself, sooner than it is done here."""
        return not isinstance(self.run, PlacedFunction | ShardedJit)

    @functools.cached_property
    def drift(self) -> Drift:
        """Watches the calls that run by the plan."""
        times = self.compared and self.compared.call_s.get(self.compared.chosen)
        return Drift(float(np.median(times)) if times else None)


class _OtherShapes(Exception):
    """Arguments are of shapes for which nothing was chosen."""


class Distributed:
    """A function that is planned at its first call, and anew for arguments of other shapes.

    Under JAX's transformations it is the function itself.

    Attributes:
      compared: for the shapes of the latest call, with what; None: there was nothing to
        compare with.
      plan: the plan that runs at these shapes; None where `jit` does, or before any call.
    """

    def __init__(
        self, fn: Callable[..., Any], devices: Devices, budget_s: float, settings: Settings
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._asks = threading.local()  # has `known_only` while shapes are not looked at
        self._name = getattr(fn, "__name__", "fn")
        self._devices, self._budget_s, self._settings = devices, budget_s, settings
        self._lowered: dict[Hashable, Lowered] = {}
        self._chosen: dict[Hashable, _Choice] = {}
        self._latest: _Choice | None = None
        self._former: dict[Hashable, _Choice] = {}  # what is planned anew

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function and returns what it returns.

        Raises:
          ValueError: the arguments are not what `dj.trace` takes.
          TaskError: a task or a transfer failed, a device was lost or time ran out; maybe of
            an earlier call: a plan's calls are asynchronous, as those of `jit` are.
        """
        latest = self._latest
        if latest is not None and latest.is_jit and len(self._chosen) == 1:
            self._asks.known_only = True
            try:
                return latest.run(*args, **kwargs)
            except _OtherShapes:
                pass
            finally:
                self._asks.known_only = False
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves))):
            return self._fn(*args, **kwargs)
        shapes = tree, tuple(map(_shape_of, leaves))
        if shapes not in self._chosen:
            self._chosen[shapes] = self._choose(args, kwargs)
        self._latest = self._chosen[shapes]
        outputs = self._latest.run(*args, **kwargs)
        if isinstance(self._latest.run, PlacedFunction):
            self._watch(self._latest.run.ended_s(), self._latest.drift)
        return outputs

    @functools.cached_property
    def _traced(self) -> Callable[..., Any]:
        """The function as `jit` takes it: shapes that it has not seen may be for a plan."""

        @functools.wraps(self._fn)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._asks, "known_only", False):
                raise _OtherShapes
            return self._fn(*args, **kwargs)

        return traced

    def _watch(self, ended_s: list[float], drift: Drift) -> None:
        """Says so if calls that have ended have become slower than they were."""
        for slow_s in filter(None, map(drift.note, ended_s)):
            self._say(
                f"calls have become slower: {1e3 * slow_s:.3g} ms at the median, where they "
                f"took {1e3 * (drift.usual_s or 0.0):.3g} ms; replan() plans the next one anew"
            )

    def replan(self) -> None:
        """Lets the next call plan anew, by costs measured afresh.

        The plans that ran compete with the new ones in whole calls.
        """
        self._former |= {
            shapes: choice
            for shapes, choice in self._chosen.items()
            if isinstance(choice.run, PlacedFunction)
        }
        self._chosen.clear()
        self._lowered.clear()

    @property
    def compared(self) -> Compared | None:
        return None if self._latest is None else self._latest.compared

    @property
    def plan(self) -> Plan | None:
        run = None if self._latest is None else self._latest.run
        return run.plan if isinstance(run, PlacedFunction) else None

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Returns the stages in between for such arguments: program, tasks, costs, plan.

        Nothing is run but what is measured, so arguments may be shapes. A call takes them over.

        Raises:
          ValueError: the arguments are not what `dj.trace` takes.
        """
        return self._lower(args, kwargs, runs=False)

    def profile(self) -> Profile:
        """Returns where the latest call's time went; see `PlacedFunction.profile`.

        Raises:
          ValueError: no plan runs at these shapes.
        """
        return self._running()[0].profile()

    def report(self, path: PathLike) -> None:
        """Writes a page that opens offline: the plan, and beside it how the latest call ran.

        Raises:
          ValueError: no plan runs at these shapes, Bokeh (extra `report`) is not there, or the
            file cannot be written.
        """
        step, lowered = self._running()
        placed, measured = lowered.placed, step.schedule
        assert measured is not None  # it was called
        panels = [(f"planned by {placed.method}", placed.schedule), ("measured", measured)]
        graph, costs, names = placed.graph, placed.costs, placed.names
        if step.graph.num_tasks != graph.num_tasks:  # fused: other tasks than were planned
            panels, graph, names = panels[1:], step.graph, step.names
            costs = measured_costs(graph, measured, costs.num_devices)
        write_report(
            path, graph, costs, panels, title=self._name, names=names,
            about=f"{lowered.said}\n\n{self.compared or ''}", curve=placed.curve,
            bound_s=placed.lower_bound_s,
        )  # fmt: skip

    def _running(self) -> tuple[PlacedFunction, Lowered]:
        """Returns what runs by a plan, and how it came to be."""
        latest = self._latest
        if latest is None or not isinstance(latest.run, PlacedFunction):
            raise ValueError(
                "no plan runs: the function has not been called, or `jit` is faster"
            )
        assert latest.lowered is not None
        return latest.run, latest.lowered

    def _lower(self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: bool) -> Lowered:
        if taken := sorted(kwargs.keys() & self._settings.tracing.keys()):
            raise ValueError(
                f"{self._name} takes {taken} by keyword, which are options of dj.distribute, "
                "too; pass them by position"
            )
        shapes = _shapes_of(args, kwargs)
        if shapes not in self._lowered:
            settings = self._settings
            if shapes in self._former:  # what is kept is what has become untrue
                settings = dataclasses.replace(settings, cache=False)
            self._lowered[shapes] = lower(
                self._fn, args, kwargs, self._devices, settings,
                PLANNING * self._budget_s, runs=runs,
            )  # fmt: skip
        return self._lowered[shapes]

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Choice:
        """Returns what calls of these shapes run."""
        for path, leaf in jax.tree.flatten_with_path((args, kwargs))[0]:
            leaf_aval(path, leaf)  # which says what is wrong with it
        until_s = time.monotonic() + self._budget_s
        held = self._settings.pin or self._settings.together
        jits = "jit runs it, whatever its pins" if held else "jit runs it"
        if len(self._devices) == 1:
            self._say(f"there is one device, so there is nothing to distribute: {jits}")
            return _Choice(jax.jit(self._traced))
        if jax.make_jaxpr(self._fn)(*args, **kwargs).effects:
            # To measure it, it would have to be run more often than it was asked for.
            self._say(f"it has effects, so it is not compared with others: {jits}")
            return _Choice(jax.jit(self._traced))
        self._say(f"planning and comparing, for {self._budget_s:.3g} s")
        lowered = self._lower(args, kwargs, runs=True)
        options = Options(mode=self._settings.mode)
        planned = load(lowered.sharded, lowered.placed, self._devices, options)
        if held:
            self._say(f"{lowered.said}; it is held to its pins, so the plan runs, uncompared")
            return _Choice(planned, None, lowered)
        rivals: dict[str, Callable[..., Any]] = {
            "plan": planned,
            **self._fused(lowered, until_s),
        }
        former = self._former.pop(_shapes_of(args, kwargs), None)
        if former is not None:
            rivals["plan before"] = former.run
        given = self._traced, lowered.sharded, self._devices
        rivals |= jit_rivals(*given)
        told = self._settings.resident is not None
        best, failed = fastest(
            sharded_jits(*given, is_batch_told=told),
            lambda run: Loop(run, lowered.sharded, args, kwargs),
            time.monotonic() + TRYING * (until_s - time.monotonic()),
        )
        rivals |= best
        loops = {name: Loop(run, lowered.sharded, args, kwargs) for name, run in rivals.items()}
        compared = compare_calls(loops, until_s)
        compared = dataclasses.replace(compared, failed=failed | compared.failed)
        chosen = rivals[compared.chosen]
        if isinstance(chosen, PlacedFunction):
            chosen.ended_s()  # these are the usual ones
        self._say(f"{lowered.said}; {compared}")
        made = former.lowered if former and compared.chosen == "plan before" else lowered
        return _Choice(chosen, compared, made)

    def _fused(self, lowered: Lowered, until_s: float) -> dict[str, PlacedFunction]:
        """Returns the plan with fewer tasks, if it has any to fuse and there is time to."""
        if time.monotonic() > until_s:
            return {}
        options = Options(mode=self._settings.mode)
        fused = load(
            lowered.sharded, lowered.placed, self._devices, options, fuse_segments=True
        )
        is_fused = fused.graph.num_tasks < lowered.sharded.graph.num_tasks
        return {"plan, fused": fused} if is_fused else {}

    def _say(self, line: str) -> None:
        print(f"doppler_jax: {self._name}: {line}", file=sys.stderr)


def distribute(
    fn: Callable[..., Any] | None = None,
    *,
    devices: Any = None,
    budget_s: float = 60.0,
    mode: str | None = None,
    method: str | Method = DEFAULT_METHOD,
    objective: Objective = Objective("serial"),  # noqa: B008, frozen
    key: chex.PRNGKey | int = 0,
    num_shards: int | None = None,
    resident: Resident = None,
    carry: Carry = None,
    unroll_scans: bool | None = None,
    pin: Pins | None = None,
    together: Together = (),
    cache: bool = True,
) -> Any:
    """Returns a function whose calls run on several devices, where that is faster.

    It is planned at its first call, and anew for arguments of other shapes: traced, cut into
    tasks, coarsely and finely, what these and transfers cost here is measured, and a plan is
    searched for; that cut is taken whose calls are shortest by simulation. The plan then
    runs in turns with itself in fewer tasks (`fuse_segments`), and with `jax.jit` of the
    function: on a device of each kind, and on all that are alike, its batch or other arguments
    sharded as is fastest. It is taken if its whole calls are faster beyond doubt; else the
    fastest `jit` is. A line on standard error says which. A function with effects is not run so
    often, and `jit` takes it; one with pins is held to them, and the plan takes it. Arguments
    that `fn` would donate are kept.

    Example:
      >>> fast = dj.distribute(lambda x: jnp.tanh(x @ x) + x, budget_s=2)
      >>> fast(jnp.eye(4)).shape  # plans, compares, and says what it found
      (4, 4)
      >>> fast(jnp.eye(4)).shape  # what was fastest runs
      (4, 4)
      >>> fast.lower(jnp.eye(4)).placed.method  # and the stages before it
      'doppler+search'

    Beside `lower` there are `compared`, `plan`, `profile()`, `report(path)` and `replan()`.

    Args:
      fn: any function that `dj.trace` takes; None: returns a decorator.
      devices: where to run, as `dj.compile` takes them, also unequal ones
        (`jax.devices("cpu") + jax.devices("gpu")`); by default all that JAX has.
      budget_s: seconds that the first call may spend on planning and comparing.
      mode: of `dj.compile`.
      method: of `dj.place`.
      objective: of `dj.place`; the kind of links changes little of how true simulated calls
        are (docs/results/fidelity.md).
      key: of what is random, a seed or a key, consumed.
      num_shards: blocks per tensor; by default what is best of one, the next power of two of
        the devices, its half and its double. Tasks with pins are cut by the second.
      resident: of `dj.trace`: which arguments stay on the devices between calls. The others,
        as far as they are not carried, are the batch; without it that may be any argument.
      carry: of `dj.trace`: which arguments are what the call before returned, as a training
        state is; whatever runs may take the arrays passed, as `jit` takes donated ones.
      unroll_scans: of `dj.trace`: whether loops are cut by iterations.
      pin: of `dj.place`: devices of tasks, by patterns of their names.
      together: of `dj.place`: patterns of tasks that share a device.
      cache: whether what is measured and planned is kept in the user's cache folder, so that
        later processes do neither again for the same function, shapes, devices, options and
        versions. `DOPPLER_JAX_CACHE` names another folder, or is `off`.

    Raises:
      ValueError: an option is invalid, or the devices are not what is expected.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; expected more than 0")
    find_method(method)
    placed_on = as_devices(jax.devices() if devices is None else devices)
    placed_on.check_options(Options(mode=mode))
    settings = Settings(
        mode=mode, method=method, objective=objective, key=key, num_shards=num_shards,
        resident=resident, carry=carry, unroll_scans=unroll_scans, pin=pin, together=together,
        cache=cache,
    )  # fmt: skip
    make = functools.partial(
        Distributed, devices=placed_on, budget_s=budget_s, settings=settings
    )
    return make if fn is None else make(fn)


def _shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    leaves, tree = jax.tree.flatten((args, kwargs))
    return tree, tuple(map(_shape_of, leaves))


def _shape_of(leaf: Any) -> Hashable:
    """Returns what a call has to have in common with another to run like it."""
    if isinstance(leaf, jax.Array):  # at every call, so it has to be quick
        return leaf.shape, leaf.dtype, leaf.weak_type
    aval = array_aval(leaf)
    return None if aval is None else (aval.shape, aval.dtype, aval.weak_type)
