"""One call from a function to a callable that runs where it should, and may go on learning."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import chex
import jax
import numpy as np

from doppler_jax.costs.build import make_costs
from doppler_jax.costs.clusters import measure_host
from doppler_jax.costs.observed import refit_costs
from doppler_jax.methods.registry import DEFAULT_METHOD, find_method
from doppler_jax.methods.request import Method
from doppler_jax.objective import Objective
from doppler_jax.placing import place
from doppler_jax.programs.blocks import flatten_args
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import Resident, trace
from doppler_jax.training.paired import median_interval
from doppler_jax.training.system_rl import propose
from doppler_jax.types import Costs, Schedule, ShardedProgram

from .calibrate import measure_calibration
from .devices import Options, TaskError
from .local import LocalDevices
from .measure import make_paired_measure
from .placed import PlacedFunction, as_devices, load

_LEAST_PLACING_S = 1.0
"""Seconds that placing gets, however long calibration took."""

_PAIRS = 7
"""Runs in which the placement found must beat the best single device."""

_TRIAL_PAIRS = 9
"""Calls of a candidate that decide, and as many of the incumbent."""

_LOOK = 3
"""Pairs after which a candidate that was slower in every one is dropped."""

_TRACES = 64
"""Latest executions that costs are fitted to."""

_PROPOSALS = 4
_EVALUATIONS = 20_000


def place_and_compile(
    fn: Callable[..., Any],
    *args: Any,
    devices: Sequence[Any] | None = None,
    mode: str = "work_conserving",
    budget_s: float = 60.0,
    method: str | Method = DEFAULT_METHOD,
    key: chex.PRNGKey | None = None,
    num_shards: int | None = None,
    resident: Resident = None,
    online: bool = False,
    max_slowdown: float = 2.0,
) -> "PlacedFunction | OnlineFunction":
    """Returns `fn` cut into tasks that run on the devices where they finish soonest.

    The program is traced and cut, its kernels and transfers are measured on the devices,
    and a placement is searched for. Then it is run in alternation with all tasks on the
    fastest single device; the faster one is returned.

    Args:
      fn: any function that `dj.trace` takes.
      *args: arguments to trace, measure and later call it with; arrays, not shapes.
      devices: where to run, as `dj.compile` takes them, also unequal ones
        (`jax.devices("cpu") + jax.devices("gpu")`); by default all that JAX has.
      mode: of `dj.compile`.
      budget_s: seconds for all of this; calibration takes what it needs of them, placing
        the rest, but at least a second.
      method: of `dj.place`.
      key: of what is random, by default `jax.random.key(0)`; it is consumed.
      num_shards: blocks per tensor, by default the next power of two of the devices.
      resident: of `dj.trace`: which arguments stay on the devices between calls.
      online: whether the result goes on learning from its calls; see `OnlineFunction`.
      max_slowdown: how much longer a call may take when the result tries something.

    Raises:
      ValueError: an argument or option is invalid; the message says which.
      TaskError: a kernel does not compile, or fails on these arguments.
    """
    began = time.monotonic()
    options = Options(mode=mode)
    devices = as_devices(jax.devices() if devices is None else devices)
    devices.check_options(options)
    if online and mode != "work_conserving":
        raise ValueError(f"online=True learns from work_conserving calls, mode is {mode!r}")
    if not max_slowdown > 1:
        raise ValueError(f"max_slowdown is {max_slowdown}; expected a number above 1")
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; expected more than 0")
    find_method(method)  # unknown ones are refused before anything is traced
    if num_shards is None:
        num_shards = 1 << (len(devices) - 1).bit_length()
    program = trace(fn, *args, resident=resident)
    cluster = measure_host(devices) if isinstance(devices, LocalDevices) else None
    sharded = partition(program, num_shards, cluster=cluster)
    flatten_args(sharded, args, {})  # shapes can be traced but not run
    costs = make_costs(sharded, measure_calibration(sharded, devices))
    placed = place(
        sharded.graph,
        costs,
        method=method,
        # Truest to real ones, as measured: docs/results/fidelity.md.
        objective=Objective("serial"),
        key=key,
        budget_s=max(budget_s - (time.monotonic() - began), _LEAST_PLACING_S),
    )
    single = np.full(sharded.graph.num_tasks, int(costs.compute_s.sum(axis=0).argmin()))
    placement = placed.placement
    # Only `exact` orders tasks; other placements were judged first come, first served.
    priority = placed.priority if placed.queue == "priority" else None
    if not np.array_equal(placement, single):
        pair = make_paired_measure(sharded, args, devices, mode)
        found = pair(placement, single, _PAIRS)
        if found.ratio >= 1:
            placement, priority = single, None
    if online:
        return OnlineFunction(sharded, costs, devices, placement, max_slowdown)
    return load(sharded, placement, priority, devices, options)


@dataclasses.dataclass
class _Trial:
    """A candidate on its way to replace the incumbent, or not."""

    step: PlacedFunction
    placement: np.ndarray
    is_warm: bool = False  # its first call is not timed
    candidate_s: list[float] = dataclasses.field(default_factory=list)
    incumbent_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def is_candidates_turn(self) -> bool:
        """Whether the next call is the candidate's; the order changes from pair to pair."""
        mine, others = len(self.candidate_s), len(self.incumbent_s)
        if not self.is_warm:
            return True
        return mine < others if mine != others else mine % 2 == 1

    def verdict(self) -> bool | None:
        """Returns whether the candidate is faster beyond doubt, None while that is open."""
        count = min(len(self.candidate_s), len(self.incumbent_s))
        ratios = np.array(self.candidate_s[:count]) / np.array(self.incumbent_s[:count])
        if count >= _TRIAL_PAIRS:
            return median_interval(ratios)[1] < 1
        return False if count >= _LOOK and (ratios > 1).all() else None


class OnlineFunction:
    """A placed function; some calls run another placement, to see whether it is faster.

    Candidates come from a search in the simulator, whose costs are fitted to the calls so
    far; that, and compiling what a candidate needs, happens in a thread beside the calls. A
    candidate's calls alternate with the incumbent's. It becomes the incumbent if it was
    faster beyond doubt; it is dropped at the first call that took `max_slowdown` times as
    long as the incumbent's, and a call that fails on it is run again on the incumbent. When
    a search has nothing new to propose, learning is over. No policy is trained.

    Not to be called from several threads at once.

    Attributes:
      placement: `[N]` of the incumbent.
      step: the `PlacedFunction` of the latest call, with its `trace` and `profile()`.
      history: what became of candidates: (calls so far, placement, whether it was taken).
    """

    def __init__(
        self,
        sharded: ShardedProgram,
        costs: Costs,
        devices: Sequence[Any],
        placement: np.ndarray,
        max_slowdown: float = 2.0,
    ) -> None:
        """Loads the first incumbent.

        Raises:
          ValueError: `max_slowdown` is not above 1, or bad devices.
        """
        if not max_slowdown > 1:
            raise ValueError(f"max_slowdown is {max_slowdown}; expected a number above 1")
        self.placement = np.asarray(placement, np.int64)
        self.history: list[tuple[int, np.ndarray, bool]] = []
        self.num_calls = 0
        self._sharded, self._costs, self._devices = sharded, costs, as_devices(devices)
        self._max_slowdown = max_slowdown
        self._incumbent = self.step = self._load(self.placement)
        self._tried = [self.placement]
        self._traces: deque[Schedule] = deque(maxlen=_TRACES)
        self._recent_s: deque[float] = deque(maxlen=_TRIAL_PAIRS)
        self._trial: _Trial | None = None
        self._waiting: deque[np.ndarray] = deque()
        self._next: Future[_Trial | None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="online placement")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program and returns the function's own pytree.

        Raises:
          ValueError: the arguments are not what the program was traced with.
          TaskError: a task or transfer failed on the incumbent.
        """
        self.num_calls += 1
        trial = self._trial
        if trial is not None and trial.is_candidates_turn:
            try:
                return self._run(trial.step, args, kwargs)
            except TaskError:
                self._end(trial, taken=False)
        return self._run(self._incumbent, args, kwargs)

    def close(self) -> None:
        """Ends learning; the incumbent can still be called."""
        self._trial = None
        self._thread.shutdown(cancel_futures=True)

    def _run(self, step: PlacedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = step(*args, **kwargs)
        self.step = step
        assert step.trace is not None
        self._traces.append(step.trace)
        self._note(step, float(step.trace.finish_s.max(initial=0.0)))
        return outputs

    def _note(self, step: PlacedFunction, seconds: float) -> None:
        """Takes the time of a call, and decides what the next one is for."""
        trial = self._trial
        if step is self._incumbent:
            self._recent_s.append(seconds)
            if trial is None:
                self._begin_trial()
            elif trial.is_warm:
                trial.incumbent_s.append(seconds)
        elif trial is not None:
            if seconds > self._max_slowdown * float(np.median(self._recent_s)):
                self._end(trial, taken=False)
            elif not trial.is_warm:
                trial.is_warm = True
            else:
                trial.candidate_s.append(seconds)
        if self._trial is not None and (verdict := self._trial.verdict()) is not None:
            self._end(self._trial, taken=verdict)

    def _end(self, trial: _Trial, *, taken: bool) -> None:
        self.history.append((self.num_calls, trial.placement, taken))
        self._trial = None
        if taken:
            self._incumbent, self.placement = trial.step, trial.placement
            self._recent_s = deque(trial.candidate_s, maxlen=_TRIAL_PAIRS)
            self._waiting.clear()  # they were found beside another incumbent

    def _begin_trial(self) -> None:
        """Takes the next candidate if it is there; asks for one if nobody did."""
        if self._next is None:
            if len(self._recent_s) == _TRIAL_PAIRS:
                seed = len(self.history)
                self._next = self._thread.submit(self._find, list(self._traces), seed)
        elif self._next.done() and not self._next.cancelled():
            # Without a candidate the finished future stays, and nobody asks again.
            self._trial = self._next.result()
            if self._trial is not None:
                self._next = None

    def _find(self, traces: list[Schedule], seed: int) -> _Trial | None:
        """Returns the next candidate, loaded; runs in the thread."""
        if not self._waiting:
            graph = self._sharded.graph
            self._waiting.extend(
                propose(
                    graph,
                    refit_costs(self._sharded, self._costs, traces),
                    traces,
                    np.stack([self.placement, *self._tried]),
                    {placement.tobytes() for placement in self._tried},
                    jax.random.key(seed),
                    count=_PROPOSALS,
                    evaluations=_EVALUATIONS,
                    links="serial",  # real links are shared; see docs/results/fidelity.md
                )
            )
        while self._waiting:
            placement = self._waiting.popleft()
            self._tried.append(placement)
            # A placement whose kernels do not compile is passed over.
            with contextlib.suppress(TaskError):
                return _Trial(self._load(placement), placement)
        return None

    def _load(self, placement: np.ndarray) -> PlacedFunction:
        return load(self._sharded, placement, None, self._devices, Options())
