"""How tensors go from process to process: `python -m experiments.transports`.

Two processes with a core each send a tensor to and fro. A hop begins with an array that is
there on one side's CPU device, and ends when a kernel on the other side could read it.

- `rings`: ours where two processes of one machine compute on CPUs.
- `sockets`: ours elsewhere, here by loopback.
- `jax.experimental.transfer`: JAX's own between processes, by loopback.
- `ray objects`: an actor's result is another one's argument.
- `ray compiled graph`: the same by Ray's channels in shared memory.

Then what it takes to ask both processes for nothing and to have their answers: by a line of
ours, and by calls of actors. And what rings are worth where both cores compute: whole calls of
a workload's plan by either of ours, on devices that are started anew for each, in turns. Times
are medians.
"""

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import doppler_jax as dj
from doppler_jax.engine.loop import Loop
from doppler_jax.engine.processes import line, transport
from doppler_jax.engine.processes.ray import end_ray, start_ray
from experiments import grid
from experiments.fidelity import ARGUMENTS
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import Machine, arguments, seconds_of
from experiments.tables import by, table

HOPS = 8
"""Of a chain of Ray's: there and back so often, so that its start and end count little."""

ANSWER_S = 120.0
"""So long may a process take to do its part."""


class End(Protocol):
    """One side of a transport."""

    def send(self, array: Any) -> None:
        """Lets an array go to the other side."""

    def receive(self) -> Any:
        """Returns what the other side sent, when it is there."""


class Ours:
    """A mesh of two processes."""

    def __init__(self, index: int, other: Connection, num_bytes: int, rings: bool) -> None:
        self._aval, self._rings = jax.ShapeDtypeStruct((num_bytes // 4,), jnp.float32), rings
        self._came: SimpleQueue[np.ndarray] = SimpleQueue()
        self._peer = 1 - index
        self._sent: Any = None
        self._mesh = transport.Mesh(index, "127.0.0.1", b"secret", self, shares_memory=rings)
        self._mesh.connect(exchange(other, index, self._mesh.address))
        assert self._mesh.has_rings == rings

    def send(self, array: Any) -> None:
        self._sent = array
        self._mesh.send(self._peer, transport.Packet(0, 0, self))

    def receive(self) -> Any:
        while self._rings and self._came.empty():
            if not self._mesh.poll():
                time.sleep(0)  # as a device that has nothing to do
        return transport.from_bytes(self._came.get(), self._aval)

    def open(self, item: int) -> tuple[float, np.ndarray]:
        del item
        return 0.0, transport.to_bytes(self._sent)

    def sent(self, item: int) -> None:
        del item

    def failed(self, item: int, error: BaseException) -> None:
        raise error

    def arrived(self, call: int, item: int, start_s: float, body: np.ndarray) -> None:
        del call, item, start_s
        self._came.put(body)

    def lost(self, peer: int) -> None:
        del peer  # it has ended


class Jax:
    """JAX's transfer servers, from which either side pulls."""

    def __init__(self, index: int, other: Connection, num_bytes: int) -> None:
        from jax.experimental import transfer

        (device,) = jax.devices()
        where = jax.sharding.SingleDeviceSharding(device)
        self._aval = jax.ShapeDtypeStruct((num_bytes // 4,), jnp.float32, sharding=where)
        self._server = transfer.start_transfer_server(
            device.client, "127.0.0.1:0", ["127.0.0.1:0"]
        )
        addresses = exchange(other, index, self._server.address())
        self._connection = self._server.connect(addresses[1 - index])
        self._next = [index, 1 - index]  # of this side, and of the other: even and odd

    def send(self, array: Any) -> None:
        self._server.await_pull(self._next[0], [array])
        self._next[0] += 2

    def receive(self) -> Any:
        (array,) = self._connection.pull(self._next[1], [self._aval])
        self._next[1] += 2
        return jax.block_until_ready(array)


def exchange(other: Connection, index: int, mine: Any) -> list[Any]:
    """Returns what both sides tell, `[2]`."""
    other.send(mine)
    theirs = other.recv()
    return [mine, theirs] if index == 0 else [theirs, mine]


ENDS: dict[str, Callable[[int, Connection, int], End]] = {
    "rings": partial(Ours, rings=True),
    "sockets": partial(Ours, rings=False),
    "jax.experimental.transfer": Jax,
}

RAYS = ("ray objects", "ray compiled graph")

CALLS = ("line", "actor calls")

WHOLE = "whole calls"

WAYS = (*ENDS, *RAYS, *CALLS, WHOLE)

NUM_SHARDS, PLANNING_S = 4, 5.0
"""Blocks per tensor of the workload, and seconds in which its plan is searched."""

WARMING = 5
"""Calls that do not count."""


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What to measure."""

    ways: tuple[str, ...] = WAYS
    """Transports of tensors, and how processes are asked."""
    num_bytes: tuple[int, ...] = (1 << 8, 1 << 16, 1 << 20, 1 << 24)
    """Sizes of tensors, multiples of four."""
    rounds: int = 500
    """Of there and back; a tenth of it are whole calls in a turn."""
    workload: str = "llama_block"
    """That is called."""
    preset: str = "medium"
    """Sizes of the workload."""
    turns: int = 3
    """Of devices that have rings, and devices that have none."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per way and size."""
    asked = context.settings
    grid.check_names("--ways", asked.ways, WAYS)
    grid.check_names("--workload", [asked.workload], list(ARGUMENTS))
    if len(os.sched_getaffinity(0)) < 2:
        raise ValueError("there is one core; expected two, one for each process")
    found = []
    for way in asked.ways:
        if way == WHOLE:
            key: Record = {"way": way} | context.key("ways", "num_bytes")
            found.append(Cell(key, partial(whole_calls, context)))
            continue
        for num_bytes in asked.num_bytes if way not in CALLS else (0,):
            key = {"way": way, "num_bytes": num_bytes, "rounds": asked.rounds}
            found.append(Cell(key, partial(measure, **key)))
    return found


def measure(way: str, num_bytes: int, rounds: int) -> Record:
    """Returns the seconds of each hop, or of asking both processes, but for the first ones."""
    if way in ENDS:
        hops_s = between_processes(way, num_bytes, rounds)
    elif way in RAYS:
        hops_s = between_actors(way, num_bytes, -(-2 * rounds // HOPS))
    else:
        hops_s = asking(way, rounds)
    return {"hops_s": hops_s[len(hops_s) // 10 :]}


def between_processes(way: str, num_bytes: int, rounds: int) -> list[float]:
    """Returns seconds of hops between two processes that are started for it."""
    context = multiprocessing.get_context("spawn")
    sides, told = context.Pipe(), context.Pipe(duplex=False)
    cores = sorted(os.sched_getaffinity(0))
    processes = [
        context.Process(
            target=run_side,
            args=(way, k, cores[k], sides[k], num_bytes, rounds, told[1]),
            daemon=True,
        )
        for k in range(2)
    ]
    try:
        for process in processes:
            process.start()
        if not told[0].poll(ANSWER_S):
            raise RuntimeError(f"{way} has taken more than {ANSWER_S:g} s")
        return told[0].recv()
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_side(
    way: str, index: int, core: int, other: Connection, num_bytes: int, rounds: int,
    told: Connection,
) -> None:  # fmt: skip
    """Is one of the two processes; the first one measures, and tells."""
    pin_to(core)
    jax.config.update("jax_platforms", "cpu")
    end, seconds = ENDS[way](index, other, num_bytes), []
    array = jax.block_until_ready(jnp.ones(num_bytes // 4, jnp.float32))
    while index == 1:  # until it is killed
        end.send(end.receive())
    for _ in range(rounds):
        began_s = time.perf_counter()
        end.send(array)
        array = end.receive()
        seconds.append((time.perf_counter() - began_s) / 2)
    told.send(seconds)
    time.sleep(ANSWER_S)  # until it is killed: the other side may not have all yet


def pin_to(core: int) -> None:
    """Keeps this process on a core, threads that it has and those to come."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def between_actors(way: str, num_bytes: int, chains: int) -> list[float]:
    """Returns seconds of a hop in each of so many chains of `HOPS` between two actors."""
    import ray

    class Side:
        def __init__(self, core: int) -> None:
            import jax

            pin_to(core)
            jax.config.update("jax_platforms", "cpu")
            self.array = np.ones(num_bytes // 4, np.float32)

        def give(self, _: int) -> np.ndarray:
            return self.array

        def hand_on(self, array: np.ndarray) -> np.ndarray:
            return np.asarray(jax.block_until_ready(jax.device_put(array)))

        def take(self, array: np.ndarray) -> int:
            return jax.block_until_ready(jax.device_put(array)).size

    start_ray(None)
    try:
        cores = sorted(os.sched_getaffinity(0))
        kind: Any = ray.remote(Side)
        actors = [kind.options(num_cpus=1).remote(cores[k]) for k in range(2)]
        ray.get([actor.give.remote(0) for actor in actors], timeout=ANSWER_S)
        run = partial(_by_objects, actors)
        if way == "ray compiled graph":
            run = partial(_by_channels, _compile_chain(actors, num_bytes))
        return [seconds_of(run) / HOPS for _ in range(chains)]
    finally:
        end_ray()


def _chain(actors: list[Any], call: Callable[..., Any], start: Any) -> Any:
    """Returns what the last hop gives; `call(method, what)` makes a hop."""
    made = call(actors[0].give, start)
    for k in range(1, HOPS):
        made = call(actors[k % 2].hand_on, made)
    return call(actors[HOPS % 2].take, made)


def _by_objects(actors: list[Any]) -> None:
    import ray

    ray.get(_chain(actors, lambda method, what: method.remote(what), 0), timeout=ANSWER_S)


def _compile_chain(actors: list[Any], num_bytes: int) -> Any:
    from ray.dag import InputNode

    with InputNode() as start:
        last = _chain(actors, lambda method, what: method.bind(what), start)
    return last.experimental_compile(_buffer_size_bytes=num_bytes + (1 << 16))


def _by_channels(graph: Any) -> None:
    import ray

    ray.get(graph.execute(0), timeout=ANSWER_S)


def asking(way: str, rounds: int) -> list[float]:
    """Returns seconds of asking both device processes for nothing."""
    with dj.ray_devices(2) as devices:
        sessions = [device.session for device in devices]

        def by_actors() -> None:
            asked = [device.call("process_id") for device in devices]
            for session, reference in zip(sessions, asked, strict=True):
                session.outcome(reference, ANSWER_S)

        def by_line() -> None:
            lines = dict(enumerate(sessions[0].lines))
            for each in lines.values():
                each.send("process_id")
            while lines:
                for k in line.wait(lines, ANSWER_S):
                    lines.pop(k).receive()

        return [seconds_of(by_line if way == "line" else by_actors) for _ in range(rounds)]


def whole_calls(context: Context[Asked]) -> Record:
    """Returns the seconds of calls of one plan, by rings and by sockets."""
    asked, plan = context.settings, None
    cut = "planner", NUM_SHARDS, ARGUMENTS[asked.workload]
    made = dj.workloads.make_workload(asked.workload, asked.preset)
    spent: dict[str, list[float]] = {"rings": [], "sockets": []}
    for _ in range(asked.turns):
        for way, calls_s in spent.items():
            os.environ[transport.RINGS] = "on" if way == "rings" else "off"
            try:
                with Machine(2, "ray") as machine:
                    problem = machine.calibrated(made, context.folder, *cut)
                    if plan is None:
                        objective = dj.Objective("serial")
                        given = problem.program, problem.costs
                        plan = dj.place(*given, objective=objective, budget_s=PLANNING_S).plan
                    step = machine.compile(problem.program, plan)
                    run = Loop(step, problem.program, arguments(problem), {})
                    seconds = [seconds_of(run) for _ in range(WARMING + asked.rounds // 10)]
                    calls_s += seconds[WARMING:]
            finally:
                del os.environ[transport.RINGS]
    return {f"{way}_s": calls_s for way, calls_s in spent.items()}


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns seconds of a hop, by size and way, those of asking, and those of whole calls."""
    hops, asked, whole = [], [], []
    for record in [r for r in records if r["way"] == WHOLE]:
        spent = {way: record[f"{way}_s"] for way in ("rings", "sockets")}
        medians = {way: float(np.median(calls_s)) for way, calls_s in spent.items()}
        whole += [
            {"workload": record["workload"], "way": way, "calls": len(calls_s)}
            | {"median_s": medians[way], "smallest_s": min(calls_s)}
            | {"over rings": medians[way] / medians["rings"]}
            for way, calls_s in spent.items()
        ]
    between = [r for r in records if r["way"] != WHOLE]
    for num_bytes, found in sorted(by(between, "num_bytes").items()):
        medians = {r["way"]: float(np.median(r["hops_s"])) for r in found}
        for record in found:
            way, median_s = record["way"], medians[record["way"]]
            row = {"way": way, "median_s": median_s, "smallest_s": min(record["hops_s"])}
            if way in CALLS:
                asked.append(row)
                continue
            over = median_s / medians["rings"] if "rings" in medians else None
            row |= {"over rings": over, "GB/s": num_bytes / median_s / 1e9}
            hops.append({"num_bytes": num_bytes} | row)
    texts = {
        "A hop": table(hops),
        "Asking both processes for nothing": table(asked),
        "Whole calls": table(whole),
    }
    return Page(texts)


QUICK = {"num_bytes": (1 << 16,), "rounds": 20, "preset": "small", "turns": 1}

STUDY = Study("transports", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
