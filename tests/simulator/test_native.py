"""The native simulator equals the plain-Python oracle in every bit."""

import contextlib
import threading

import numpy as np
import pytest

from doppler_jax.graphs.build import topological_order
from doppler_jax.objective import LINKS
from doppler_jax.simulator import native, native_kernels, oracle
from doppler_jax.simulator.disciplines import QUEUES
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.memory_kernels import make_memory_work, peak_bytes, prepare_memory
from doppler_jax.simulator.native import Plans, prepare, simulate_native, simulate_one
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import simulate
from tests.generators import (
    coarsen,
    numbers,
    random_factors,
    random_problem,
    topological_ranks,
    wide_problem,
)
from tests.simulator.cases import small_problem

PARTS = [range(start, start + 200) for start in range(100, 2100, 200)]
"""Two thousand further cases."""

SIZES = [0, 1, 2, 3, 5, 8, 13, 20, 34, 64]


def native_times(graph, costs, placements, **options):
    """Makespans, starts and finishes; makespans alone must be the same."""
    plans = Plans(graph, costs, placements)
    alone, *_ = simulate_native(plans, **options)
    found = simulate_native(plans, schedule=True, **options)
    np.testing.assert_array_equal(alone, found[0])
    return found


def assert_equals_oracle(graph, costs, placements, links, queue, ranks, noise):
    found = native_times(
        graph, costs, placements, links=links, queue=queue, ranks=ranks, **noise
    )
    for b, placement in enumerate(placements):
        rank = ranks if ranks is None or ranks.ndim == 1 else ranks[b]
        schedule = simulate_oracle(
            graph, costs, placement, links=links, queue=queue, priority=rank, **noise
        )
        expected = makespan_s(schedule), schedule.start_s, schedule.finish_s
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array[b], wanted)


def random_case(seed):
    """A problem with three placements, ranks of each queue, and noise or none."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.choice(SIZES)), int(rng.integers(1, 9))
    kind = rng.choice(["generic", "dyadic", "coarse"])
    graph, costs = random_problem(rng, n, d, dyadic=kind != "generic", makers=True)
    if kind == "coarse":  # much happens at one instant, and the order among devices counts
        graph, costs = coarsen(rng, graph, costs)
    if rng.random() < 0.3:
        unable = rng.random(costs.compute_s.shape) < 0.05
        costs = costs.replace(compute_s=np.where(unable, np.inf, costs.compute_s))
    if rng.random() < 0.5:
        each_s, per_byte = numbers(rng, (2, d), kind != "generic")
        costs = costs.replace(handling_s=each_s, handling_s_per_byte=per_byte)
    noise = random_factors(rng, graph, d) if rng.random() < 0.4 else {}
    ranks = {
        "fifo": None,
        "priority": rng.integers(0, 9, (3, n)) if rng.random() < 0.5 else rng.random((3, n)),
        "in_order": np.array([topological_ranks(rng, graph) for _ in range(3)]),
        "random": np.array([rng.permutation(n) for _ in range(3)]),
    }
    if rng.random() < 0.4:
        ranks = {queue: None if r is None else r[0] for queue, r in ranks.items()}
    return graph, costs, rng.integers(0, d, (3, n)), ranks, noise


@pytest.mark.parametrize(
    "seeds", [range(100), *(pytest.param(part, marks=pytest.mark.slow) for part in PARTS)]
)
def test_equals_the_oracle_in_every_bit(seeds):
    for seed in seeds:
        graph, costs, placements, ranks, noise = random_case(seed)
        assert set(ranks) == set(QUEUES)
        for queue, links in ((queue, links) for queue in QUEUES for links in LINKS):
            assert_equals_oracle(graph, costs, placements, links, queue, ranks[queue], noise)


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("links", LINKS)
def test_wide_graphs(links, queue):
    rng = np.random.default_rng(7)
    graph, costs = wide_problem(rng, 150, 3, 3)
    ranks = None
    if queue != "fifo":
        ranks = np.arange(450)
        ranks = np.concatenate([rng.permutation(layer) for layer in np.split(ranks, 3)])
    assert_equals_oracle(graph, costs, rng.integers(0, 3, (2, 450)), links, queue, ranks, {})


def test_many_tasks_and_devices():
    rng = np.random.default_rng(0)
    n, devices = 16500, 64
    graph, costs = wide_problem(rng, n // 10, 10, devices)
    placement = rng.integers(0, devices, (1, n))
    assert_equals_oracle(graph, costs, placement, "parallel", "fifo", None, {})
    ranks = rng.integers(0, n, n)
    assert_equals_oracle(graph, costs, placement, "serial", "priority", ranks, {})


@pytest.mark.parametrize(
    "seeds",
    [
        range(500),
        *(
            pytest.param([5 * s + k for s in part for k in range(5)], marks=pytest.mark.slow)
            for part in PARTS
        ),
    ],
)
def test_other_disciplines_are_replayed_in_order(seeds):
    """Ranked by the sequence of its starts, any schedule is one of `in_order`."""
    for seed in seeds:
        graph, costs, placements, ranks, noise = random_case(seed + 20000)
        queue = ("fifo", "priority", "random")[seed % 3]
        links, rank = LINKS[seed // 3 % 3], ranks[queue]
        rank = rank if rank is None or rank.ndim == 1 else rank[0]
        with starts_recorded() as started:
            schedule = simulate_oracle(
                graph, costs, placements[0], links=links, queue=queue, priority=rank, **noise
            )
        # What never starts comes last, in an order without a turn.
        order = started + [v for v in topological_order(graph) if v not in started]
        replay = np.empty(graph.num_tasks)
        replay[order] = np.arange(graph.num_tasks)
        _, start_s, finish_s = native_times(
            graph, costs, placements[:1], links=links, queue="in_order", ranks=replay, **noise
        )
        np.testing.assert_array_equal(start_s[0], schedule.start_s)
        np.testing.assert_array_equal(finish_s[0], schedule.finish_s)


@contextlib.contextmanager
def starts_recorded():
    """Yields the list that the oracle's starts are written to, in their sequence."""
    started = []

    def start_best(run, now):
        found = original(run, now)
        if found:
            started.append(int(np.flatnonzero(np.isfinite(run.start_s) & ~seen(run))[0]))
        return found

    def seen(run):
        return np.isin(np.arange(len(run.start_s)), started)

    original = oracle._Run._start_best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle._Run, "_start_best", start_best)
        yield started


def test_senders_and_receivers_take_turns():
    # Tasks 0 and 1 on device 0 end at 1 and 2 s, task 2 on device 2 at 1.75 s, after its
    # input's half second; each sends four seconds of data to device 1, which takes one at a
    # time: the tensors of tasks 0, 2 and 1 arrive at 5, 9 and 13 s.
    graph, costs = small_problem(
        [1, 1, 1.25, 1, 1, 1], [(0, 4, [3]), (1, 4, [4]), (2, 4, [5])], 3, [(0, 0.5, [2])]
    )
    makespans, starts, _ = native_times(graph, costs, [[0, 0, 2, 1, 1, 1]], links="duplex")
    np.testing.assert_array_equal(starts[0], [0, 1, 0.5, 5, 13, 9])
    assert makespans[0] == 14


def test_inputs_go_before_tensors_that_are_requested_at_zero():
    # Task 0 takes no time; its tensor and the input both go from device 0 to device 1.
    graph, costs = small_problem([0, 1, 1], [(0, 2, [1])], 2, [(0, 3, [2])])
    _, starts, _ = native_times(graph, costs, [[0, 1, 1]], links="duplex")
    np.testing.assert_array_equal(starts[0], [0, 5, 3])


def test_tensors_of_one_request_time_go_by_id_not_by_producer():
    # Devices 0 and 1 finish tasks 0 and 1 together; tensor 0 is task 1's.
    graph, costs = small_problem([1, 1, 1, 1], [(1, 2, [2]), (0, 2, [3])], 3)
    _, starts, _ = native_times(graph, costs, [[0, 1, 2, 2]], links="duplex")
    np.testing.assert_array_equal(starts[0], [0, 0, 3, 5])


@pytest.mark.parametrize("links", LINKS)
def test_an_order_that_turns_a_precedence_round_is_refused(links):
    graph, costs = small_problem([1, 1, 1], [(2, 1, [0])], 2)
    devices = np.zeros((2, 3), int)
    ranks = np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    options = {"links": links, "queue": "in_order"}
    message = r"task 0 \(rank 0\) before task 2 \(rank 2\)"
    with pytest.raises(ValueError, match=message):
        native_times(graph, costs, devices, ranks=ranks, **options)
    with pytest.raises(ValueError, match=message):
        native_times(graph, costs, devices, ranks=ranks[1], **options)
    native_times(graph, costs, devices, ranks=ranks[:1].repeat(2, 0), **options)
    ranks[0, 1] = np.nan
    with pytest.raises(ValueError, match=r"priority\[1\] is nan"):
        native_times(graph, costs, devices, ranks=ranks, **options)


def test_threads_share_a_batch_and_change_nothing(monkeypatch):
    rng = np.random.default_rng(1)
    graph, costs = random_problem(rng, 40, 4)
    placements = rng.integers(0, 4, (1000, 40))
    ranks = np.array([topological_ranks(rng, graph) for _ in range(1000)])
    options = {"links": "serial", "queue": "in_order", "ranks": ranks}
    alone = native_times(graph, costs, placements, **options)
    monkeypatch.setattr(native, "SHARE", 100)
    monkeypatch.setattr(native, "num_cores", lambda: 3)
    used, all_began = set(), threading.Barrier(3)
    run_rows = native_kernels.run_rows

    def watched(*arguments):
        if len(used) < 3 and threading.get_ident() not in used:
            used.add(threading.get_ident())
            all_began.wait(60)
        return run_rows(*arguments)

    monkeypatch.setattr(native_kernels, "run_rows", watched)
    together = native_times(graph, costs, placements, **options)
    assert len(used) == 3
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_is_compiled_for_a_graph_or_a_kind_of_array():
    rng = np.random.default_rng(2)
    for n, d in ((5, 1), (30, 4)):
        graph, costs = random_problem(rng, n, d)
        costs = costs.replace(compute_s=np.asfortranarray(costs.compute_s.astype(np.float32)))
        costs.compute_s.setflags(write=False)
        native_times(graph, costs, np.zeros((3, n), np.int8))
        ranks = np.arange(n)
        ranks.setflags(write=False)
        native_times(graph, costs, np.zeros((3, n), int), queue="priority", ranks=ranks)
    assert len(native_kernels.run_rows.signatures) == 1


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("links", LINKS)
def test_one_schedule_is_the_oracles_with_its_transfers_and_its_memory(links, queue):
    for seed in range(60):
        graph, costs, placements, ranks, _ = random_case(seed + 30000)
        rank = (
            ranks[queue] if ranks[queue] is None or ranks[queue].ndim == 1 else ranks[queue][0]
        )
        options = {"links": links, "queue": queue, "priority": rank}
        found = simulate_one(graph, costs, placements[0], **options)
        wanted = simulate_oracle(graph, costs, placements[0], **options)
        for field, expected in vars(wanted).items():
            np.testing.assert_array_equal(getattr(found, field), expected, err_msg=field)
        costs = costs.replace(
            tensor_bytes=np.ceil(8 * costs.tensor_bytes),
            input_bytes=np.ceil(8 * costs.input_bytes),
        )
        times = native_times(
            graph,
            costs,
            placements,
            ranks=ranks[queue],
            links=links,
            queue=queue,
            transfers=True,
        )
        for b, placement in enumerate(placements if graph.num_tasks else ()):
            rank = ranks[queue] if rank is None or ranks[queue].ndim == 1 else ranks[queue][b]
            options["priority"] = rank
            schedule = simulate_oracle(graph, costs, placement, **options)
            peak = peak_memory_bytes(graph, costs, schedule)
            row = [array[b] for array in times[1:]]
            np.testing.assert_array_equal(native_peak(graph, costs, placement, row), peak)
            # With enough memory the sum will do; where it does not, the peak is looked for.
            enough = np.where(np.arange(costs.num_devices) % 2, np.inf, peak)
            bound = native_peak(graph, costs, placement, row, enough)
            assert (bound[1::2] >= peak[1::2]).all()
            np.testing.assert_array_equal(bound[::2], peak[::2])


def native_peak(graph, costs, placement, times, enough=0.0):
    """Peak bytes `[D]` by the compiled rule, of one row's starts, finishes and moves."""
    problem, enough = prepare(graph, costs), np.broadcast_to(enough, costs.num_devices)
    memory = prepare_memory(graph, costs, problem, enough)
    rows = native_kernels.make_rows(problem, placement[None].astype(np.uint32))
    names = ("start_s", "finish_s", "sent_s", "arrival_s")
    times = {name: array[None] for name, array in zip(names, times, strict=True)}
    work = make_memory_work(memory)
    peak_bytes(memory, work, rows._replace(**times))
    return work.peak


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("queue", ["fifo", "priority", "in_order"])
def test_what_is_asked_for_later_is_of_what_was_given(queue, kind, monkeypatch):
    monkeypatch.setattr(native, "SHARE", 100)  # threads
    rng = np.random.default_rng(3)
    graph, costs = random_problem(rng, 30, 4)
    placements = rng.integers(0, 4, (40, 30)).astype(kind)
    ranks = np.array([topological_ranks(rng, graph) for _ in range(40)])
    ranks = ranks.astype(kind) if kind != np.int64 else ranks / 3 - 1  # no permutation
    given = {} if queue == "fifo" else {"priority": ranks.copy()}
    expected = native_times(
        graph, costs, placements, queue=queue, ranks=ranks if given else None
    )
    result = simulate(graph, costs, placements, queue=queue, **given)
    placements[:], ranks[:] = 0, 0
    for array in given.values():
        array[:] = 0
    for name, array in zip(("makespan_s", "start_s", "finish_s"), expected, strict=True):
        np.testing.assert_array_equal(getattr(result, name), array)


@pytest.mark.parametrize("device", [-1, 4, 255, 1 << 32, 1 << 63])
def test_devices_that_do_not_exist_are_refused(device):
    graph, costs = random_problem(np.random.default_rng(3), 9, 4)
    placements = np.zeros((5, 9), np.int64 if device < 1 << 63 else np.uint64)
    placements[3, 7] = device
    with pytest.raises(ValueError, match=f"placement 3 puts task 7 on device {device};"):
        simulate(graph, costs, placements)
