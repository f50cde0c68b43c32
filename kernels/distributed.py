"""The front door: a function whose calls run where they end soonest, planned at its first.

A plan has to beat what its user has without us, in whole calls: `jax.jit` of the function.
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from doppler_jax.programs.blocks import leaf_aval
from doppler_jax.training.paired import median_interval
from doppler_jax.types import Plan

from .automatic import place_and_compile
from .devices import Devices
from .local import LocalDevices
from .placed import PlacedFunction, as_devices
from .profile import Profile

ROUNDS = 15
"""Calls of each rival, in turns: 6 are needed to be sure, more where some are too close."""

PLANNING = 0.6
"""Share of the budget for planning; the rest is for comparing."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a plan was compared with, in whole calls until their outputs can be used.

    Attributes:
      call_s: seconds of every call, by rival: "plan", "jit on <device>".
      chosen: which of them runs from now on.
    """

    call_s: dict[str, tuple[float, ...]]
    chosen: str

    def __str__(self) -> str:
        medians = ", ".join(
            f"{name} {1e3 * float(np.median(times)):.3g} ms"
            for name, times in self.call_s.items()
        )
        return f"{self.chosen} runs from now on; a call takes, at the median: {medians}"


class Distributed:
    """A function that is planned at its first call, and anew for arguments of other shapes.

    Under JAX's transformations it is the function itself.

    Attributes:
      compared: for the shapes of the latest call, with what; None: there was nothing to
        compare with.
      plan: the plan that runs at these shapes; None where `jit` does, or before any call.
    """

    def __init__(
        self, fn: Callable[..., Any], devices: Devices, budget_s: float, options: dict[str, Any]
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._jitted = fn, jax.jit(fn)
        self._devices, self._budget_s, self._options = devices, budget_s, options
        self._chosen: dict[Hashable, tuple[Callable[..., Any], Compared | None]] = {}
        self._latest: Callable[..., Any] | None = None
        self.compared: Compared | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function and returns what it returns.

        Raises:
          ValueError: the arguments are not what `dj.trace` takes.
          TaskError: a task or a transfer failed, a device was lost or time ran out.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._fn(*args, **kwargs)
        shapes = tuple(_shape_of(leaf) for leaf in leaves)
        if (tree, shapes) not in self._chosen:
            self._chosen[tree, shapes] = self._choose(args, kwargs)
        self._latest, self.compared = self._chosen[tree, shapes]
        return self._latest(*args, **kwargs)

    @property
    def plan(self) -> Plan | None:
        return self._latest.plan if isinstance(self._latest, PlacedFunction) else None

    def profile(self) -> Profile:
        """Returns where the latest call's time went; see `PlacedFunction.profile`.

        Raises:
          ValueError: no plan runs at these shapes.
        """
        if not isinstance(self._latest, PlacedFunction):
            raise ValueError(
                "no plan runs: the function has not been called, or `jit` is faster"
            )
        return self._latest.profile()

    def _choose(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], Compared | None]:
        """Returns what calls of these shapes run, and what it was compared with."""
        name, until_s = getattr(self._fn, "__name__", "fn"), time.monotonic() + self._budget_s
        if len(self._devices) == 1:
            _say(f"{name}: there is one device, so there is nothing to distribute: jit runs it")
            return self._jitted, None
        if jax.make_jaxpr(self._fn)(*args, **kwargs).effects:
            # To measure it, it would have to be run more often than it was asked for.
            _say(f"{name} has effects, so it is not compared with others: jit runs it")
            return self._jitted, None
        taken = sorted(kwargs.keys() & self._options.keys())
        if taken:
            raise ValueError(
                f"{name} takes {taken} by keyword, which are options of dj.distribute, too; "
                "pass them by position"
            )
        options = {**self._options, "devices": self._devices}
        planned = place_and_compile(
            self._fn, *args, budget_s=PLANNING * self._budget_s, **options, **kwargs
        )
        if self._options.get("pin") or self._options.get("together"):
            _say(f"{name} is held to its pins, so it is not compared with jit: the plan runs")
            return planned, None
        rivals: dict[str, Callable[..., Any]] = {"plan": planned, **self._on_single_devices()}
        compared = compare_calls(rivals, args, kwargs, until_s)
        _say(f"{name}: {compared}")
        return rivals[compared.chosen], compared

    def _on_single_devices(self) -> dict[str, Callable[..., Any]]:
        """Returns `jit` on a device of each kind: of those that we have, or of this process."""
        own = list(self._devices) if isinstance(self._devices, LocalDevices) else jax.devices()
        kinds = {(device.platform, device.device_kind): device for device in reversed(own)}
        return {
            f"jit on {device}": functools.partial(_call_on, device, self._jitted)
            for device in kinds.values()
        }


def distribute(
    fn: Callable[..., Any] | None = None,
    *,
    devices: Any = None,
    budget_s: float = 60.0,
    **options: Any,
) -> Any:
    """Returns a function whose calls run on several devices, where that is faster.

    It is planned at its first call (`dj.engine.place_and_compile`), and anew for other
    shapes. The plan then runs in turns with `jax.jit` of the function on a device of each kind.
    It is taken if its whole calls are faster beyond doubt; else the fastest `jit` is. A line on
    standard error says which. A function with effects is not run so often, and `jit` takes it;
    one with pins is held to them, and the plan takes it. Arguments that `fn` would donate are
    kept.

    Example:
      >>> fast = dj.distribute(step, devices=jax.devices())
      >>> loss = fast(params, batch)  # plans, and says what it found
      >>> fast.compared.chosen

    Args:
      fn: any function that `dj.trace` takes; None: returns a decorator.
      devices: where to run, as `dj.compile` takes them; by default all that JAX has.
      budget_s: seconds that the first call may spend on planning and comparing.
      **options: of `dj.engine.place_and_compile`: `resident`, `pin`, `together`, `method`, ...

    Raises:
      ValueError: an option is invalid or unknown, or the devices are not what is expected.
    """
    known = place_and_compile.__kwdefaults__ or {}
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"unknown options {unknown}; expected some of {sorted(known)}")
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; expected more than 0")
    placed_on = as_devices(jax.devices() if devices is None else devices)
    make = functools.partial(Distributed, devices=placed_on, budget_s=budget_s, options=options)
    return make if fn is None else make(fn)


def compare_calls(
    rivals: dict[str, Callable[..., Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    until_s: float,
) -> Compared:
    """Runs rivals in turns; the first is chosen if it is faster than all others beyond doubt.

    Else that of the others is whose median is least. Beyond doubt is where the 95% interval of
    the median ratio of neighbouring calls is below 1.

    Args:
      rivals: functions, by name.
      args: arguments of a call.
      kwargs: and by keyword.
      until_s: of `time.monotonic`, when to stop; each runs at least once.
    """
    for call in rivals.values():  # compiles, and brings what stays to its devices
        jax.block_until_ready(call(*args, **kwargs))
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for k in range(ROUNDS):
        if k and time.monotonic() > until_s:
            break
        names = list(rivals)[:: 1 if k % 2 else -1]
        for name in names:
            began_s = time.perf_counter()
            jax.block_until_ready(rivals[name](*args, **kwargs))
            times[name].append(time.perf_counter() - began_s)
    first, *others = times
    chosen = min(others, key=lambda name: float(np.median(times[name])))
    ratios = [np.array(times[first]) / np.array(times[other]) for other in others]
    if all(median_interval(ratio)[1] < 1 for ratio in ratios):
        chosen = first
    return Compared({name: tuple(found) for name, found in times.items()}, chosen)


def _call_on(device: jax.Device, jitted: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with jax.default_device(device):
        return jitted(*args, **kwargs)


def _shape_of(leaf: Any) -> Hashable:
    """Returns what a call has to have in common with another to run like it."""
    if isinstance(leaf, jax.Array):  # at every call, so it has to be quick
        return leaf.shape, leaf.dtype, leaf.weak_type
    with contextlib.suppress(ValueError):
        aval = leaf_aval((), leaf)
        return aval.shape, aval.dtype, aval.weak_type
    return str(type(leaf))  # planning says what is wrong with it


def _say(line: str) -> None:
    print(f"doppler_jax: {line}", file=sys.stderr)
