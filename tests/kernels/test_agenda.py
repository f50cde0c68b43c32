"""What an agenda waits for, moves and lays, by hand and against the graph."""

import numpy as np
import pytest

from doppler_jax.engine.agenda import Transfer, make_agenda
from doppler_jax.types import Plan
from tests.kernels.conftest import at_home, build, random_program

# Task 0 reads x's first block and the constant, task 1 the same block, task 2 the results.
OPERANDS = [["i0", "i2"], ["i0", "i0"], ["t0", "t1"]]
TASKS = build([("mean", pair) for pair in OPERANDS], ["t2", "i0"])


def test_resident_inputs_lie_wherever_they_are_read():
    agenda = make_agenda(TASKS, Plan(np.array([1, 0, 0])))
    assert sorted(agenda.inputs) == [(0, 0, 6), (0, 1, 4), (1, 0, 7), (2, 1, 5)]
    assert agenda.initial_transfers == ()
    assert agenda.transfers == (Transfer(0, 0, 1, 0, 0, 3, (2,)),)
    assert agenda.task_transfers == ((0,), (), ())
    assert agenda.num_inputs == (0, 0, 2)
    assert agenda.local_readers == ((), (2,), ())
    assert agenda.outputs == ((7,), (2, 6))


def test_inputs_of_a_call_leave_their_home_at_time_0_where_read_elsewhere():
    sharded = at_home(TASKS, [0, 0, -1])
    agenda = make_agenda(sharded, Plan(np.array([1, 2, 0])))
    moves = {(t.tensor, t.destination): t for t in agenda.transfers}
    assert list(moves) == [(~0, 1), (~0, 2), (0, 0), (1, 0)]
    assert agenda.initial_transfers == (0, 1)
    home = moves[~0, 1].source_slot
    assert moves[~0, 1] == Transfer(~0, -1, 0, 1, home, 3, (0,))
    assert moves[~0, 2] == Transfer(~0, -1, 0, 2, home, 4, (1,))
    assert {(i, device) for i, device, _ in agenda.inputs} == {(0, 0), (1, 0), (2, 1)}
    assert (0, 0, home) in agenda.inputs
    assert agenda.operands[1] == (4, 4)
    assert agenda.num_inputs == (1, 1, 2)
    # Two transfers and an output read it; a task that reads a copy twice reads it once.
    assert agenda.num_reads[home] == 3
    assert agenda.num_reads[4] == 1
    assert agenda.outputs[1] == (2, home)
    agenda = make_agenda(at_home(TASKS, [1, 0, 1]), Plan(np.array([1, 1, 1])))
    assert agenda.transfers == ()
    assert agenda.num_inputs == (0, 0, 2)
    assert {(i, device) for i, device, _ in agenda.inputs} == {(0, 1), (1, 0), (2, 1)}


@pytest.mark.parametrize("seed", range(20))
def test_every_task_gets_what_it_reads(seed):
    """Executes the agenda on names of values instead of arrays."""
    rng = np.random.default_rng(seed)
    sharded = at_home(random_program(seed, 25), rng.integers(-1, 3, 3))
    placement = rng.integers(0, 3, 25)
    agenda = make_agenda(sharded, Plan(placement, rng.permutation(25), "priority"))
    where = {slot: (f"i{i}", device) for i, device, slot in agenda.inputs}
    missing = list(agenda.num_inputs)
    reads = [0] * len(agenda.num_reads)

    def move(k):
        transfer = agenda.transfers[k]
        value, device = where[transfer.source_slot]
        assert (device, transfer.destination) == (transfer.source, transfer.destination)
        assert device != transfer.destination
        where[transfer.slot] = (value, transfer.destination)
        reads[transfer.source_slot] += 1
        for v in transfer.readers:
            missing[v] -= 1

    for k in agenda.initial_transfers:
        move(k)
    for v in agenda.order:
        assert missing[v] == 0
        device = placement[v]
        expected = [
            (f"i{r.input}" if hasattr(r, "input") else f"t{r.tensor}", device)
            for r in sharded.operands[v]
        ]
        assert [where[s] for s in agenda.operands[v]] == expected
        for slot in set(agenda.operands[v]):
            reads[slot] += 1
        for slot in agenda.results[v]:
            where[slot] = (f"t{slot}", device)
        for reader in agenda.local_readers[v]:
            missing[reader] -= 1
        for k in agenda.task_transfers[v]:
            move(k)
    for output, slots in zip(sharded.outputs, agenda.outputs, strict=True):
        for ref, slot in zip(output.blocks, slots, strict=True):
            assert where[slot][0] in (f"i{getattr(ref, 'input', '')}", f"t{slot}")
            reads[slot] += 1
    assert tuple(reads) == agenda.num_reads
    assert len(where) == len(agenda.num_reads)


def test_tasks_are_ordered_by_rank_then_id():
    sharded = build([("make", [])] * 3 + [("mean", ["t0", "t1"])], ["t3", "t2"])
    places = np.zeros(4, int)
    assert make_agenda(sharded, Plan(places)).order == (0, 1, 2, 3)
    ranked = Plan(places, np.array([5.0, 1.0, 9.0, 0.0]), "priority")
    assert make_agenda(sharded, ranked).order == (1, 0, 3, 2)
