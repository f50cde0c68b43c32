"""What an execution of a plan has to do, and by which rules what may run when.

An agenda is worked out once, before any call. The rules of a mode are told what has happened
and say what may happen next; threads and device processes follow the same ones.
"""

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.programs.blocks import forwarded
from doppler_jax.simulator.disciplines import ReadySet, find_discipline
from doppler_jax.simulator.synchronous import hop_levels
from doppler_jax.types import RESIDENT, InputRef, Plan, Ref, ShardedProgram, TaskGraph


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One tensor, or graph input, on its way to one other device that hosts readers of it."""

    tensor: int  # ~i for graph input i, as in `Schedule.transfer_tensor`
    producer: int  # task; -1 for a graph input
    source: int
    destination: int
    source_slot: int
    slot: int  # of the copy
    readers: tuple[int, ...]  # tasks on `destination`


@dataclasses.dataclass(frozen=True)
class Agenda:
    """N tasks on D devices, their X transfers, and S slots of values.

    A slot is a tensor or graph input on one device: where its array is during a call.
    Slot x below T is tensor x on its producer's device; the copies follow, then the inputs.

    Before the clock starts, resident graph inputs lie on each device that reads them and
    the others on their homes; from there they go as transfers that are requested at 0.
    """

    mode: str  # a row of `RULES`
    names: tuple[str, ...]  # [N]
    placement: tuple[int, ...]  # [N]
    queue: str  # the discipline by which devices choose what they start next
    rank: tuple[float, ...] | None  # [N] by that discipline; None: it has none
    order: tuple[int, ...]  # [N] topological, by rank and id among available tasks
    tasks: tuple[tuple[int, ...], ...]  # [D] of each device, by id
    levels: tuple[int, ...]  # [N] hops from an entry
    operands: tuple[tuple[int, ...], ...]  # [N] slots, as the kernel takes them
    reads: tuple[tuple[int, ...], ...]  # [N] those slots, each once
    results: tuple[tuple[int, ...], ...]  # [N] slots, as the kernel gives them
    num_inputs: tuple[int, ...]  # [N] tensors and moved graph inputs to wait for
    local_readers: tuple[tuple[int, ...], ...]  # [N] once per tensor that is read
    transfers: tuple[Transfer, ...]  # [X] graph inputs, then tensors; by id and destination
    initial_transfers: tuple[int, ...]  # those of graph inputs
    task_transfers: tuple[tuple[int, ...], ...]  # [N] transfers of its tensors
    num_reads: tuple[int, ...]  # [S] tasks, transfers and outputs that read the slot
    inputs: tuple[tuple[int, int, int], ...]  # (graph input, device, slot) laid before
    outputs: tuple[tuple[int, ...], ...]  # slots of the blocks, per flat output
    carried: frozenset[int]  # flat outputs whose blocks stay; arguments unchanged have none

    def ready_set(self, device: int) -> ReadySet:
        """Returns what a call on a device begins with: no task is ready yet."""
        here = self.tasks[device] if device < len(self.tasks) else ()
        return ReadySet(find_discipline(self.queue), self.rank, here)


def make_agenda(sharded: ShardedProgram, plan: Plan, mode: str = "work_conserving") -> Agenda:
    """Returns the agenda of a plan that has been checked, and suits the mode."""
    graph, placement, priority = sharded.graph, plan.placement, plan.priority
    places = placement.tolist()
    makers, homes = graph.tensor_producer.tolist(), graph.homes(placement).tolist()
    remote = _remote_readers(graph, placement)
    copies = {key: graph.num_tensors + k for k, key in enumerate(remote)}
    inputs: dict[tuple[int, int], int] = {}  # by (graph input, device)

    def input_slot(i: int, device: int) -> int:
        return inputs.setdefault((i, device), graph.num_tensors + len(copies) + len(inputs))

    def slot(ref: Ref, device: int) -> int:
        if not isinstance(ref, InputRef):
            return copies.get((ref.tensor, device), ref.tensor)
        copy = copies.get((~ref.input, device))
        return input_slot(ref.input, device) if copy is None else copy

    def transfer(x: int, there: int) -> Transfer:
        producer = makers[x] if x >= 0 else -1
        source = places[producer] if x >= 0 else homes[~x]
        held = x if x >= 0 else input_slot(~x, source)
        key = (x, there)
        return Transfer(x, producer, source, there, held, copies[key], remote[key])

    operands = [
        tuple(slot(ref, device) for ref in refs)
        for refs, device in zip(sharded.operands, places, strict=True)
    ]
    # An output's block is where it was made, or at its home.
    known = forwarded(sharded)
    outputs = [
        ()
        if o in known
        else tuple(
            input_slot(ref.input, max(homes[ref.input], 0))
            if isinstance(ref, InputRef)
            else ref.tensor
            for ref in output.blocks
        )
        for o, output in enumerate(sharded.outputs)
    ]
    transfers = tuple(transfer(*key) for key in remote)
    edges = zip(*map(np.ndarray.tolist, task_edges(graph)), strict=True)
    waits = np.bincount(graph.edge_reader, minlength=len(places))
    initial = tuple(k for k, t in enumerate(transfers) if t.producer < 0)
    for k in initial:
        waits[list(transfers[k].readers)] += 1
    reads = tuple(tuple(dict.fromkeys(of_task)) for of_task in operands)
    num_reads = Counter(s for of_task in reads for s in of_task)
    num_reads.update(t.source_slot for t in transfers)
    num_reads.update(s for blocks in outputs for s in blocks)
    return Agenda(
        mode=mode,
        names=sharded.names,
        placement=tuple(places),
        queue=plan.queue,
        rank=None if priority is None else tuple(priority.tolist()),
        order=tuple(topological_order(graph, priority).tolist()),
        tasks=_by_number(max(places, default=-1) + 1, ((d, v) for v, d in enumerate(places))),
        levels=tuple(hop_levels(graph).tolist()),
        operands=tuple(operands),
        reads=reads,
        results=_by_number(len(places), ((v, x) for x, v in enumerate(makers))),
        num_inputs=tuple(waits.tolist()),
        local_readers=_by_number(
            len(places), (e for e in edges if places[e[0]] == places[e[1]])
        ),
        transfers=transfers,
        initial_transfers=initial,
        task_transfers=_by_number(
            len(places), ((t.producer, k) for k, t in enumerate(transfers) if t.producer >= 0)
        ),
        num_reads=tuple(
            num_reads[s] for s in range(graph.num_tensors + len(transfers) + len(inputs))
        ),
        inputs=tuple((*key, slot) for key, slot in inputs.items()),
        outputs=tuple(outputs),
        carried=frozenset(o for _, o in sharded.carried if o not in known),
    )


def _by_number(count: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the second of the pairs by their first, a number below `count`."""
    found: list[list[int]] = [[] for _ in range(count)]
    for number, item in pairs:
        found[number].append(item)
    return tuple(map(tuple, found))


def _remote_readers(
    graph: TaskGraph, placement: np.ndarray
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Returns the readers of each (tensor or ~input, device) that gets it by a transfer."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    senders, readers = task_edges(graph)
    homes = graph.homes(placement)[graph.input_edge_input]
    input_readers = graph.input_edge_reader
    for items, source, reader in (
        (~graph.input_edge_input, homes, input_readers),
        (graph.edge_tensor, placement[senders], readers),
    ):
        moves = (source != placement[reader]) & (source != RESIDENT)
        ends = (items[moves], placement[reader][moves], reader[moves])
        for x, there, v in zip(*map(np.ndarray.tolist, ends), strict=True):
            groups[x, there].append(v)
    order = sorted(groups, key=lambda key: (key[0] >= 0, max(key[0], ~key[0]), key[1]))
    return {key: tuple(groups[key]) for key in order}


Next = tuple[Iterable[int], Iterable[int]]
"""Tasks that may run now, and transfers that start now."""

NOTHING: Next = ((), ())


class Asynchronous:
    """A device runs what is ready, by its queue discipline.

    As of all rules there is one object a call, told of each event once: `launched` when a task
    has run, or will have before any task given to its device later; `finished`; `arrived` of
    transfers. All has run when every task has finished, for what is moved is read.

    A task that finishes releases those on its device that wait only for it, and starts the
    transfers of what it made; an arrival releases likewise.
    """

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._inputs_left = list(agenda.num_inputs)

    def begin(self) -> Next:
        ready = [v for v, count in enumerate(self._inputs_left) if not count]
        return ready, self._agenda.initial_transfers

    def launched(self, v: int) -> Next:
        return self._release(self._agenda.local_readers[v]), ()

    def finished(self, v: int) -> Next:
        return (), self._agenda.task_transfers[v]

    def arrived(self, k: int) -> Next:
        return self._release(self._agenda.transfers[k].readers), ()

    def _release(self, readers: Sequence[int]) -> list[int]:
        ready, left = [], self._inputs_left
        for v in readers:
            left[v] -= 1
            if not left[v]:
                ready.append(v)
        return ready


def phases(agenda: Agenda) -> list[tuple[list[int], list[int]]]:
    """Returns the tasks of each phase of bulk-synchronous dispatch, and its transfers.

    The first moves inputs that have a home; each other one runs a level of tasks (equally many
    hops from an entry) and then moves what they made. All of it ends before the next begins.
    """
    found: list[tuple[list[int], list[int]]] = [([], list(agenda.initial_transfers))]
    found += [([], []) for _ in range(max(agenda.levels, default=-1) + 1)]
    for v, level in enumerate(agenda.levels):
        tasks, transfers = found[level + 1]
        tasks.append(v)
        transfers.extend(agenda.task_transfers[v])
    return found


class BulkSynchronous:
    """Level by level, with barriers before and after transfers; for comparison."""

    def __init__(self, agenda: Agenda) -> None:
        parts: list[tuple[list[int], list[int]]] = []  # one ends before the next begins
        for tasks, transfers in phases(agenda):
            parts += [(tasks, []), ([], transfers)]
        self._parts = deque(filter(any, parts))
        self._left = 0  # of the part's tasks or transfers

    def begin(self) -> Next:
        if not self._parts:
            return NOTHING
        tasks, transfers = self._parts.popleft()
        self._left = len(tasks) + len(transfers)
        return tasks, transfers

    def launched(self, v: int) -> Next:
        return NOTHING

    def finished(self, event: int) -> Next:
        self._left -= 1
        return NOTHING if self._left else self.begin()

    arrived = finished


RULES: dict[str, type[Asynchronous] | type[BulkSynchronous]] = {
    "bulk_synchronous": BulkSynchronous,
    "in_order": Asynchronous,
    "work_conserving": Asynchronous,
}
"""By mode."""
