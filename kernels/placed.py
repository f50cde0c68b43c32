"""The public door: a sharded program and a plan in, a callable out."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import topological_order
from doppler_jax.placed import Placed
from doppler_jax.programs.arguments import leaf_names, name_arguments
from doppler_jax.programs.blocks import are_tied, donated, flatten_args, forwarded
from doppler_jax.programs.outputs import Output
from doppler_jax.programs.provenance import check_no_mesh
from doppler_jax.reports.perfetto import write_chrome_trace
from doppler_jax.simulator.disciplines import check_ranks
from doppler_jax.simulator.durations import check_placement
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.types import InputRef, Plan, Schedule, ShardedProgram, TaskGraph

from . import ops
from .agenda import make_agenda
from .devices import Devices, LoadedProgram, Options
from .local import LocalDevices
from .processes.driver import ProcessDevices
from .processes.session import ProcessDevice
from .profile import Profile, measured_costs, profile
from .running import Call, History, allow_transfers
from .segments import fuse_segments as fuse
from .trace import CALLER, Chore, Chores, Handled, WholeCall


def compile(
    sharded: ShardedProgram,
    plan: Placed | Plan | ArrayLike,
    *,
    devices: Sequence[Any],
    mode: str | None = None,
    fuse_segments: bool = False,
    check_nan: bool = False,
    timeout_s: float | None = None,
    out_device: int | None = None,
) -> "PlacedFunction":
    """Returns the program as a function that runs each task where it is placed.

    Example:
      >>> sharded = dj.partition(dj.trace(jnp.matmul, jnp.eye(4), jnp.eye(4)), num_shards=2)
      >>> placement = np.arange(sharded.graph.num_tasks) % 2
      >>> step = dj.compile(sharded, placement, devices=jax.devices("cpu")[:2])
      >>> float(step(jnp.eye(4), jnp.eye(4)).sum())
      4.0

    Args:
      sharded: the program, N tasks.
      plan: what `dj.place` found, or a `dj.Plan`; or a placement alone, `[N]` int, position in
        `devices` of each task, whose queue is `fifo`.
      devices: where to run: JAX devices, on which threads of this process run tasks, or
        `dj.ray_devices(...)`, a process per device. In place of a list,
        `dj.engine.LocalDevices(...)` keeps compiled kernels for other plans; processes
        always do.
      mode: "in_order" (every device runs its own tasks in the plan's order, without one in
        the topological order of smallest ids), "work_conserving" (a device takes its next
        ready task: under `fifo` the one that was ready first, else the one of least rank) or
        "bulk_synchronous" (level by level, with barriers before and after each level's
        transfers); None: "in_order" where that is the plan's queue, else "work_conserving".
      fuse_segments: whether tasks of one device that nothing separates become one task;
        the trace is then of the tasks of `PlacedFunction.graph`.
      check_nan: whether a NaN in what a task made ends the call with a `TaskError`.
      timeout_s: after which a call ends with a `TaskError`.
      out_device: position in `devices` where outputs land; by default each lands where its
        first block was made.

    Raises:
      ValueError: an unknown mode, no devices, one twice or closed ones, an option out of
        range, a placement or priority of another shape or out of range, or an order in which
        a task comes before one that it reads from. Nothing is compiled then.
      TaskError: a kernel does not compile.
    """
    options = Options(mode, check_nan, timeout_s, out_device)
    return load(sharded, plan, as_devices(devices), options, fuse_segments=fuse_segments)


def as_devices(devices: Sequence[Any]) -> Devices:
    """Returns what runs programs on the devices given, which say themselves what they are.

    Raises:
      ValueError: `devices` is empty, one occurs twice, they are of different sorts or closed.
    """
    if not isinstance(devices, Devices):
        are_processes = any(isinstance(device, ProcessDevice) for device in devices)
        devices = ProcessDevices(devices) if are_processes else LocalDevices(devices)
    devices.check_open()
    return devices


def load(
    sharded: ShardedProgram,
    plan: Placed | Plan | ArrayLike,
    devices: Devices,
    options: Options,
    *,
    fuse_segments: bool = False,
) -> "PlacedFunction":
    """Returns the planned program on devices, which many plans may share.

    Raises:
      ValueError: a placement or priority of another shape or out of range, an order that
        cannot be kept, or an option.
      TaskError: a kernel does not compile.
    """
    check_no_mesh()
    devices.check_options(options)
    apart = functools.partial(
        load, sharded.untied or sharded, plan, devices, options, fuse_segments=fuse_segments
    )
    plan, mode = _dispatch(sharded, as_plan(plan), len(devices), options.mode)
    if fuse_segments:
        sharded, plan = fuse(sharded, plan)
    loaded = devices.load(sharded, make_agenda(sharded, plan, mode), options)
    return PlacedFunction(loaded, plan, devices.device_names, apart)


def as_plan(plan: Placed | Plan | ArrayLike) -> Plan:
    """Returns what is given as a plan; a placement alone is one of queue `fifo`."""
    if isinstance(plan, Placed):
        return plan.plan
    return plan if isinstance(plan, Plan) else Plan(plan)


def _dispatch(
    sharded: ShardedProgram, plan: Plan, num_devices: int, mode: str | None
) -> tuple[Plan, str]:
    """Returns the plan as it is executed, checked, and the mode.

    Its queue is the discipline by which devices choose, and its ranks are those that it takes.
    """
    graph, known = sharded.graph, ("fifo", "priority", "in_order")
    if plan.queue not in known:
        raise ValueError(f"the plan's queue is {plan.queue!r}; expected one of {known}")
    places = check_placement(graph, num_devices, plan.placement)
    mode = mode or ("in_order" if plan.queue == "in_order" else "work_conserving")
    queue, priority = "fifo" if plan.queue == "fifo" else "priority", plan.priority
    if mode == "in_order":
        queue = mode
        priority = np.argsort(topological_order(graph)) if priority is None else priority
    elif queue == "fifo":
        priority = None
    return Plan(places, check_ranks(graph, queue, priority, sharded.names), queue), mode


class PlacedFunction:
    """A function whose tasks run on several devices; call it like the plain function.

    Attributes:
      graph: the tasks that run, N of them; not the program's if segments were fused.
      names: `[N]` of the tasks.
      plan: by which they run: devices, ranks `[N]` and the queue that the mode makes of it.
      device_names: `[D]` of the devices.
      mode: how tasks are dispatched.
      compile_s: seconds spent compiling, shared executables not counted.
      starts_are_inferred: whether the trace's starts (and, in part, finishes) follow from
        dispatch times and finishes that the host saw. So in `in_order` on accelerators.
    """

    def __init__(
        self,
        loaded: LoadedProgram,
        plan: Plan,
        device_names: tuple[str, ...],
        apart: Callable[[], "PlacedFunction"],
    ) -> None:
        self.graph: TaskGraph = loaded.sharded.graph
        self.names = loaded.sharded.names
        self.plan = plan
        self.device_names = device_names
        self.mode = loaded.agenda.mode
        self.starts_are_inferred = loaded.infers_starts
        self.compile_s = loaded.compile_s
        self._history = History()
        self._loaded = loaded
        self._apart = apart
        self._donated = frozenset(donated(loaded.sharded))
        self._forwarded = forwarded(loaded.sharded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Starts the program and returns the function's own pytree, of arrays yet to be made.

        Whoever looks at one waits for the call, as `jax.block_until_ready` does, and gets its
        error: a `TaskError` if a task or a transfer failed, a device was lost or time ran out.
        Calls queued behind it raise the same. One may run ahead, the next one waits for the
        first. What is carried is the call's own from now on, and the caller's again if it
        fails; an array that no placed function made is deleted when the call has ended, until
        then only placed functions refuse it.

        Raises:
          ValueError: the arguments are not what the program was traced with, or a mesh is set.
          TypeError: they are tracers: JAX transforms what has been compiled.
          TaskError: an earlier call failed, and nobody has seen it.
        """
        began_s, chores = time.perf_counter(), Chores()
        check_no_mesh()
        values = flatten_args(self._loaded.sharded, args, kwargs)
        if any(isinstance(value, jax.core.Tracer) for value in values):
            raise TypeError(
                "a placed function has been compiled: jax.jit, grad, vmap and others cannot be "
                "applied to it; apply them to the function before dj.trace"
            )
        if not are_tied(self._loaded.sharded, values):  # from now on they are two graph inputs
            vars(self).update(vars(self._apart()), _history=self._history)
        calls = self._loaded.calls
        call = Call(calls, self._history, self._loaded, began_s, chores)
        with calls.starting(call):
            outputs = self._start(call, values)
        return jax.tree.unflatten(self._loaded.sharded.out_tree, outputs)

    def _start(self, call: Call, values: list[Any]) -> list[Any]:
        """Starts a call, and returns its flat outputs; those before have ended but for one."""
        loaded, chores = self._loaded, call.chores
        self._tell_failure()
        self._check_there(values)
        with allow_transfers():
            chores.append(Chore("take arguments", CALLER, call.began_s, time.perf_counter()))
            with chores.doing("lay arguments"):
                laid = loaded.lay(values)
            before = loaded.calls.latest
            call.running = loaded.start(laid, chores, before.running if before else None)
        kept = {id(value) for i, value in enumerate(values) if i not in self._donated}
        taken = [values[i] for i in self._donated if id(values[i]) not in kept]
        taken = [value for value in taken if hasattr(value, "delete")]
        call.begun(ops.inherit(call.running.finish), taken)
        call.outputs = loaded.outputs(call)
        outputs = list(call.outputs)
        for o, source in self._forwarded.items():
            outputs[o] = values[source]
        return outputs

    def _tell_failure(self) -> None:
        """Raises the error of the latest call, if it is known and nobody has looked at it."""
        latest = self._history.latest
        if latest is not None and latest.error is not None and not latest.error.was_raised:
            latest.check()

    def _check_there(self, values: Sequence[Any]) -> None:
        """Raises for an argument that an earlier call took, or failed to make."""
        running = self._loaded.calls.latest
        taken = {id(value) for value in running.taken} if running else set()
        for i, value in enumerate(values):
            is_output = isinstance(value, Output)
            if not (is_output or i in self._donated):
                continue
            if id(value) in taken or getattr(value, "is_deleted", bool)():
                sharded = self._loaded.sharded
                names = leaf_names(name_arguments(sharded.in_tree, ()))
                raise ValueError(
                    f"{names[i]} was carried into an earlier call, which took it, or deleted "
                    "otherwise; expected what that call returned in its place"
                )
            if is_output:
                value.check()

    def run_traced(self, *args: Any, **kwargs: Any) -> Schedule:
        """Runs the program and returns the trace of that call; raises what a call raises."""
        self(*args, **kwargs)
        return self._called().schedule

    @property
    def schedule(self) -> Schedule | None:
        """The trace of the latest call; None before.

        It is in seconds from the dispatch of its first task or input transfer, with transfers.
        What else the call did is in `whole_call`. As all that tells of the latest call, this
        waits for it, and raises its error if nobody has seen that.
        """
        return None if (call := self._latest()) is None else call.schedule

    @property
    def handling(self) -> Handled | None:
        """Device, start and finish of each time that a device itself moved tensors.

        That is between two tasks of the latest call, on its trace's clock: on CPU processes of
        one machine, else never; None before.
        """
        return None if (call := self._latest()) is None else call.record.handling

    @property
    def whole_call(self) -> WholeCall:
        """The latest call from its beginning until its outputs could be used.

        Of one that ran behind another that includes the wait for it, and the outputs can be
        used when somebody looks: only calls that are awaited at once compare.

        Raises:
          ValueError: there was no call yet.
        """
        call = self._called()
        # Without tasks the trace has no clock.
        origin_s = call.record.origin_s
        origin_s = origin_s if np.isfinite(origin_s) else call.began_s
        shifted = (
            Chore(c.name, c.device, c.start_s - origin_s, c.finish_s - origin_s)
            for c in call.chores
        )
        return WholeCall(call.began_s - origin_s, call.ended_s - origin_s, tuple(shifted))

    @property
    def peak_bytes(self) -> np.ndarray:
        """`[D]` most memory that the latest call held at once, arguments included.

        What runs beside it is not counted. An allocator that tells is believed: the most since
        the process began, whatever took it.

        Raises:
          ValueError: there was no call yet.
        """
        call = self._called()
        outputs = [ref for output in self._loaded.sharded.outputs for ref in output.blocks]
        results = {~ref.input if isinstance(ref, InputRef) else ref.tensor for ref in outputs}
        costs = measured_costs(self.graph, call.schedule, len(self.device_names))
        counted = peak_memory_bytes(self.graph, costs, call.schedule, results)
        told = zip(call.allocated_bytes, counted, strict=True)
        return np.array([own if most is None else most for most, own in told], np.float64)

    def profile(self) -> Profile:
        """Returns what the time of the latest call went on, to print.

        Raises:
          ValueError: there was no call yet.
        """
        call = self._called()
        return profile(
            self.graph,
            call.schedule,
            self.names,
            self.device_names,
            self.peak_bytes,
            call.record.handling,
            self.whole_call,
        )

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the latest call's trace as Chrome trace JSON, which Perfetto opens.

        Raises:
          ValueError: there was no call yet, or the path cannot be written.
        """
        call = self._called()
        write_chrome_trace(
            path,
            call.schedule,
            self.names,
            device_names=self.device_names,
            inferred_starts=self.starts_are_inferred,
            handling=call.record.handling,
            chores=self.whole_call.chores,
            plan=self.plan,
        )

    def ended_s(self) -> list[float]:
        """Returns seconds of the calls, by themselves, that ended since this was asked.

        The last ones of many. A call does not count behind another, nor while nobody looked.
        """
        new = self._history.new
        return [new.popleft().seconds for _ in range(len(new))]

    def _latest(self) -> Call | None:
        """Returns the latest call that ended well, when all have ended; None: there is none."""
        if self._history.latest is not None and self._history.latest.is_running:
            self._history.latest.finish()
        self._tell_failure()
        return self._history.ended

    def _called(self) -> Call:
        if (call := self._latest()) is None:
            raise ValueError("there is no trace: call the function first")
        return call
