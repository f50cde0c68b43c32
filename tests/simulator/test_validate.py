import dataclasses
import time

import numpy as np
import pytest

import doppler_jax as dj
from tests.generators import free_costs, make_schedule, random_problem, small_graph
from tests.simulator.cases import change, small_problem, with_transfers

# Task 0 makes tensors 0 (read by 2 and 3) and 1 (read by 2); task 1 makes tensor 2 (read by
# 2). Task 4 is free. Graph input 0 lies on device 0, input 1 everywhere.
#
#   device 0  |0 0|4 4 4|3|
#   device 1  .1 1....2          (task 1 waits 0.5 s for its input, task 2 for tensor 0)
TENSORS = [(0, 4.0, [2, 3]), (0, 2.0, [2]), (1, 1.0, [2])]
GRAPH = small_graph(np.ones(5), TENSORS, [(0, 1.0, [1]), (dj.graphs.RESIDENT, 9.0, [4])])
COSTS = free_costs(
    GRAPH,
    [[2, 9], [9, 1], [9, 1], [1, 9], [3, np.inf]],
    latency_s=np.array([[0.0, 0.25], [0.25, 0.0]]),
    seconds_per_byte=np.array([[0.0, 0.25], [0.25, 0.0]]),
)
SCHEDULE = make_schedule(
    [0, 1, 1, 0, 0],
    [0.0, 0.5, 3.25, 5.0, 2.0],
    [2.0, 1.5, 4.25, 6.0, 5.0],
    [(0, 0, 1, 2.0, 3.25), (1, 0, 1, 2.0, 2.75)],
)


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_accepts_the_legal_schedule(tolerance):
    dj.simulator.validate(GRAPH, SCHEDULE, COSTS, tolerance=tolerance)
    dj.simulator.validate(GRAPH, with_transfers(SCHEDULE), COSTS, tolerance=tolerance)
    dj.simulator.validate(GRAPH, SCHEDULE, tolerance=tolerance)


def test_accepts_an_empty_graph():
    nothing = dj.simulator.Schedule(
        **{f.name: np.zeros(0, int) for f in dataclasses.fields(dj.simulator.Schedule)}
    )
    dj.simulator.validate(dj.make_graph(flops=[]), nothing)


ILLEGAL = {
    "shape": ({"start_s": np.zeros(4)}, r"start_s has shape \(4,\), expected \(5,\)"),
    "rank": ({"finish_s": np.zeros((5, 1))}, r"finish_s has shape \(5, 1\), expected \(5,\)"),
    "type": ({"placement": np.zeros(5)}, "placement must hold integers"),
    "unplaced": ({"placement": {4: -1}}, "task 4 is on device -1"),
    "nan": ({"finish_s": {3: np.nan}}, "task 3 on device 0 .* not finite"),
    "never": ({"start_s": {3: np.inf}, "finish_s": {3: np.inf}}, "task 3 .* not finite"),
    "early": ({"start_s": {0: -1.0}}, "task 0 .* before time 0"),
    "backwards": ({"finish_s": {2: 3.0}}, "task 2 .* finishes before it starts"),
    "overlap": ({"start_s": {3: 4.5}}, "task 4 .* and task 3 .* overlap"),
    "overlap inside": (
        {"start_s": {4: 0.5}, "finish_s": {4: 0.5}},
        "task 0 .* and task 4 .* overlap",
    ),
    "local read": (
        {"start_s": {3: 0.0, 0: 1.0, 4: 4.0}, "finish_s": {3: 1.0}},
        r"task 3 .* before task 0 on device 0 \(1 to 2 s\) ends",
    ),
    "remote read": (
        {"start_s": {2: 3.0}},
        r"task 2 on device 1 .* before transfer of tensor 0 .* 3.25 s\) ends",
    ),
    "transfer shape": ({"transfer_start_s": np.zeros(1)}, "transfer_start_s"),
    "transfer tensor": ({"transfer_tensor": {0: 3}}, r"transfer_tensor\[0\] is 3"),
    "transfer source": (
        {"transfer_source": {1: 1}},
        "tensor 1 .* does not leave from device 0",
    ),
    "transfer place": ({"transfer_destination": {0: 2}}, "tensor 0 .* to 2 .* is needless"),
    "transfer home": ({"transfer_destination": {0: 0}}, "tensor 0 .* to 0 .* is needless"),
    "transfer early": ({"transfer_start_s": {0: 1.0}}, "tensor 0 .* before task 0"),
    "transfer back": ({"transfer_finish_s": {1: 1.5}}, "tensor 1 .* before it starts"),
    "transfer nan": ({"transfer_finish_s": {1: np.nan}}, "tensor 1 .* not finite"),
}


@pytest.mark.parametrize("costs", [COSTS, None])
@pytest.mark.parametrize("name", ILLEGAL)
def test_refuses_an_illegal_schedule(name, costs):
    changes, message = ILLEGAL[name]
    compute = COSTS.compute_s.copy()
    changed = change(SCHEDULE, **changes)
    if costs is not None and changed.start_s.shape == changed.finish_s.shape == (5,):
        # Durations that fit the change, so that the rule itself must speak.
        with np.errstate(invalid="ignore"):
            durations = np.nan_to_num(changed.finish_s - changed.start_s)
        compute[np.arange(5), SCHEDULE.placement] = durations
        costs = dataclasses.replace(COSTS, compute_s=compute)
    with pytest.raises(ValueError, match=message):
        dj.simulator.validate(GRAPH, changed, costs)


@pytest.mark.parametrize("costs", [COSTS, None])
def test_refuses_a_second_transfer(costs):
    with pytest.raises(ValueError, match=r"tensor 1 from device 0 to 1 .* happens twice"):
        dj.simulator.validate(GRAPH, with_transfers(SCHEDULE, [0, 1, 1]), costs)


def test_refuses_a_missing_transfer():
    for rows in ([0], []):
        with pytest.raises(ValueError, match="has no transfer to device 1, where task 2"):
            dj.simulator.validate(GRAPH, with_transfers(SCHEDULE, rows))


UNLIKE_COSTS = {
    "duration": (change(SCHEDULE, finish_s={3: 6.5}), "task 3 on device 0 .* should take 1 s"),
    "impossible": (
        change(SCHEDULE, placement={4: 1}, start_s={4: 5.0}, finish_s={4: 8.0}),
        "task 4 on device 1 .* cannot run",
    ),
    "no device": (change(SCHEDULE, placement={4: 2}), "task 4 is on device 2, of 2 devices"),
    "input": (
        change(SCHEDULE, start_s={1: 0.0}, finish_s={1: 1.0}),
        r"task 1 on device 1 .* before transfer of graph input 0 .* to 0.5 s\) ends",
    ),
    "derived arrival": (
        with_transfers(change(SCHEDULE, start_s={2: 3.0}, finish_s={2: 4.0})),
        r"task 2 on device 1 .* before transfer of tensor 0 .* to 3.25 s\) ends",
    ),
    "slow link": (
        change(
            SCHEDULE,
            transfer_finish_s={0: 3.5},
            start_s={2: 3.5},
            finish_s={2: 4.5},
        ),
        "tensor 0 .* should take 1.25 s",
    ),
    "late transfer": (
        change(SCHEDULE, transfer_start_s={1: 2.25}, transfer_finish_s={1: 3.0}),
        "tensor 1 .* should start at 2 s, when parallel links",
    ),
    "idle at the end": (
        change(SCHEDULE, start_s={2: 4.25}, finish_s={2: 5.25}),
        "device 1 idles from 3.25 s, .* task 2 starts",
    ),
    "idle at first": (
        change(SCHEDULE, start_s={1: 1.0}, finish_s={1: 2.0}),
        "device 1 idles from 0.5 s, .* task 1 starts",
    ),
    "wrong order": (
        change(SCHEDULE, start_s={3: 2.0, 4: 3.0}, finish_s={3: 3.0, 4: 6.0}),
        r"device 0 starts task 3 \(ready at 2 s\) at 2 s before task 4 \(ready at 0 s\)",
    ),
}


@pytest.mark.parametrize("name", UNLIKE_COSTS)
def test_refuses_what_the_costs_forbid(name):
    schedule, message = UNLIKE_COSTS[name]
    with pytest.raises(ValueError, match=message):
        dj.simulator.validate(GRAPH, schedule, COSTS)


def test_priority_decides_among_ready_tasks():
    other = change(SCHEDULE, start_s={3: 2.0, 4: 3.0}, finish_s={3: 3.0, 4: 6.0})
    last = np.array([0, 0, 0, 1, 2])
    dj.simulator.validate(GRAPH, other, COSTS, queue="priority", priority=last)
    with pytest.raises(ValueError, match=r"device 0 starts task 4 .* before task 3"):
        dj.simulator.validate(GRAPH, SCHEDULE, COSTS, queue="priority", priority=last)
    # Task 3 is not ready at 0: whatever its rank, task 0 or 4 goes first.
    dj.simulator.validate(GRAPH, SCHEDULE, COSTS, queue="priority", priority=[0, 0, 0, 2, 1])


def on_one_device(start, costs):
    placement, start = np.zeros(len(start), int), np.array(start, float)
    times = {"start_s": start, "finish_s": start + costs.compute_s[:, 0]}
    return change(with_transfers(SCHEDULE), placement=placement, **times)


def test_equal_ready_times_are_ties_by_id():
    graph, costs = small_problem([1, 2], [], 1)
    dj.simulator.validate(graph, on_one_device([0.0, 1.0], costs), costs)
    with pytest.raises(ValueError, match=r"starts task 1 .* before task 0"):
        dj.simulator.validate(graph, on_one_device([2.0, 0.0], costs), costs)


def test_nearly_equal_ready_times_may_go_either_way():
    graph, costs = small_problem([1, 1, 1, 1], [(0, 1, [2]), (1, 1, [3])], 1)
    schedule = on_one_device([0.0, 1.0, 2.0, 3.0], costs)
    dj.simulator.validate(graph, schedule, costs, tolerance=0)
    swapped = on_one_device([0.0, 1.0, 3.0, 2.0], costs)
    with pytest.raises(ValueError, match=r"starts task 3 .* before task 2"):
        dj.simulator.validate(graph, swapped, costs)
    dj.simulator.validate(
        graph, swapped, costs, tolerance=0.25
    )  # ready 1 s apart, makespan 4 s


def test_zero_length_tasks_release_within_an_instant():
    # At 1 s task 2 takes no time and releases task 0; task 3 has waited since 0.
    graph, costs = small_problem([1, 1, 0, 1], [(2, 1, [0])], 1)
    dj.simulator.validate(graph, on_one_device([2.0, 0.0, 1.0, 1.0], costs), costs, tolerance=0)
    with pytest.raises(ValueError, match=r"starts task 0 .* before task 3"):
        dj.simulator.validate(
            graph, on_one_device([1.0, 0.0, 1.0, 2.0], costs), costs, tolerance=0
        )
    # All ready at 0, but task 0 not there when tasks 1 and 2 start, only when 3 does.
    graph, costs = small_problem([1, 0, 0, 1], [(2, 1, [0])], 1)
    for order in ({}, {"queue": "priority", "priority": [0, 1, 2, 3]}):
        dj.simulator.validate(
            graph, on_one_device([0.0, 0.0, 0.0, 1.0], costs), costs, tolerance=0, **order
        )
        with pytest.raises(ValueError, match=r"starts task 3 .* before task 0"):
            dj.simulator.validate(
                graph, on_one_device([1.0, 0.0, 0.0, 0.0], costs), costs, **order
            )
    # Task 3 goes before the task that would release task 0.
    worst = {"queue": "priority", "priority": [0, 1, 3, 2]}
    dj.simulator.validate(
        graph, on_one_device([1.0, 0.0, 1.0, 0.0], costs), costs, tolerance=0, **worst
    )


def test_at_one_instant_the_best_task_of_all_devices_starts_first():
    # Task 0 on device 0 takes no time and releases task 2 on device 1, which takes none. But
    # of all that is ready at 0 task 1 on device 1 goes first, and keeps it until 1 s.
    graph, costs = small_problem([0, 1, 0], [(0, 0, [2])], 2)
    sent = [(0, 0, 1, 0.0, 0.0)]
    order = {"queue": "priority", "priority": [2, 1, 0], "tolerance": 0}
    dj.simulator.validate(
        graph, make_schedule([0, 1, 1], [0, 0, 1], [0, 1, 1], sent), costs, **order
    )
    with pytest.raises(ValueError, match=r"device 1 starts task 2 .* at 0 s before task 1"):
        dj.simulator.validate(
            graph, make_schedule([0, 1, 1], [0, 0, 0], [0, 1, 0], sent), costs, **order
        )


def test_duplex_links_take_hardly_more_than_linear_time():
    seconds = []
    for n in (1000, 4000):
        tensors = [(v, 1, [n + v]) for v in range(n)]
        graph, costs = small_problem([0] * n + [1] * n, tensors, 2)  # all wait for one port
        placement = np.repeat([0, 1], n)
        schedule = dj.simulator.simulate_oracle(graph, costs, placement, links="duplex")
        times = []
        for _ in range(3):
            begun = time.process_time()
            dj.simulator.validate(
                graph, schedule, costs, objective=dj.Objective("duplex"), tolerance=0
            )
            times.append(time.process_time() - begun)
        seconds.append(min(times))
    assert seconds[1] < 8 * seconds[0]  # 16 if each were compared with all others


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"queue": "lifo"}, "unknown queue 'lifo'"),
        ({"queue": "random"}, "queue 'random' needs a priority for every task"),
        ({"compute_factor": [1.0]}, r"compute_factor has shape \(1,\), expected \(5,\)"),
        ({"transfer_factor": np.zeros((3, 2))}, r"transfer_factor\[0, 0\] is 0.0"),
        ({"queue": "in_order"}, "queue 'in_order' needs a priority for every task"),
        ({"queue": "priority", "priority": [1, 2]}, r"priority has shape \(2,\)"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"costs": dataclasses.replace(COSTS, compute_s=np.ones((4, 2)))}, "of 4 tasks"),
        (
            {"costs": dataclasses.replace(COSTS, compute_s=np.full((5, 2), 1.0))},
            "task 0 .* should take 1 s",
        ),
    ],
)
def test_refuses_bad_arguments(keywords, message):
    with pytest.raises(ValueError, match=message):
        dj.simulator.validate(GRAPH, SCHEDULE, **{"costs": COSTS, **keywords})


def test_noise_scales_what_is_expected():
    placement = np.array([0, 1, 1, 0, 0])
    noise = {
        "compute_factor": np.array([1.0, 2.0, 1.0, 1.0, 1.0]),
        "transfer_factor": np.array([[1.0, 2.0], [1.0, 1.0], [1.0, 1.0]]),
    }
    schedule = dj.simulator.simulate_oracle(GRAPH, COSTS, placement, **noise)
    dj.simulator.validate(GRAPH, schedule, COSTS, tolerance=0, **noise)
    with pytest.raises(ValueError, match=r"task 1 .* should take 1 s"):
        dj.simulator.validate(GRAPH, schedule, COSTS)
    with pytest.raises(ValueError, match=r"tensor 0 .* should take 1.25 s"):
        dj.simulator.validate(GRAPH, schedule, COSTS, compute_factor=noise["compute_factor"])
    with pytest.raises(ValueError, match=r"task 1 .* should take 2 s"):
        dj.simulator.validate(GRAPH, SCHEDULE, COSTS, **noise)


@pytest.mark.parametrize("dyadic", [True, False])
def test_accepts_the_oracle_and_nothing_else(dyadic):
    """At tolerance 0 the rules leave one schedule: the one that the oracle makes."""
    accepted = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n, d = int(rng.integers(0, 40)), int(rng.integers(1, 5))
        graph, costs = random_problem(rng, n, d, dyadic=dyadic)
        placement = rng.integers(0, d, n)
        ranks = rng.permutation(n)
        fifo = dj.simulator.simulate_oracle(graph, costs, placement)
        ranked = dj.simulator.simulate_oracle(
            graph, costs, placement, queue="priority", priority=ranks
        )
        dj.simulator.validate(graph, fifo, costs, tolerance=0)
        dj.simulator.validate(
            graph, ranked, costs, queue="priority", priority=ranks, tolerance=0
        )
        dj.simulator.validate(
            graph, with_transfers(ranked), costs, queue="priority", priority=ranks
        )
        if np.array_equal(fifo.start_s, ranked.start_s):
            accepted += 1
            continue
        with pytest.raises(ValueError, match="before task"):
            dj.simulator.validate(graph, ranked, costs, tolerance=0)
        with pytest.raises(ValueError, match="before task"):
            dj.simulator.validate(
                graph, fifo, costs, queue="priority", priority=ranks, tolerance=0
            )
    assert accepted < 30


def test_accepts_float32_schedules():
    rng = np.random.default_rng(0)
    graph, costs = random_problem(rng, 64, 4)
    for placement in rng.integers(0, 4, (10, 64)):
        exact = with_transfers(dj.simulator.simulate_oracle(graph, costs, placement))
        times = {name: getattr(exact, name).astype("f4") for name in ("start_s", "finish_s")}
        dj.simulator.validate(graph, change(exact, **times), costs)


# Tasks 0 and 1 on device 0 (ending at 1 and 2 s) and task 2 on device 2 (ending at 1.75 s,
# its graph input takes half a second) each send a tensor to device 1, which takes 4 s.
LINKED, LINKED_COSTS = small_problem(
    [1, 1, 1.25, 1, 1, 1], [(0, 4, [3]), (1, 4, [4]), (2, 4, [5])], 3, [(0, 0.5, [2])]
)
LINKED_PLACEMENT = [0, 0, 2, 1, 1, 1]


def on_links(links, starts, tensor_starts, input_start=0.0):
    """The schedule with these starts of tasks 3 to 5, of tensors 0 to 2 and of the input."""
    legal = dj.simulator.simulate_oracle(LINKED, LINKED_COSTS, LINKED_PLACEMENT, links=links)
    start_s = np.append(legal.start_s[:3], starts)
    by_item = dict(zip([0, 1, 2, ~0], [*tensor_starts, input_start], strict=True))
    transfer_start_s = np.array([by_item[x] for x in legal.transfer_tensor.tolist()])
    lengths = legal.transfer_finish_s - legal.transfer_start_s
    return change(
        legal,
        start_s=start_s,
        finish_s=start_s + LINKED_COSTS.compute_s[:, 0],
        transfer_start_s=transfer_start_s,
        transfer_finish_s=transfer_start_s + lengths,
    )


@pytest.mark.parametrize(
    ("links", "starts", "tensor_starts"),
    [
        ("parallel", [5, 7, 6], [1, 2, 1.75]),
        ("serial", [5, 9, 6], [1, 5, 1.75]),
        ("duplex", [5, 13, 9], [1, 9, 5]),
    ],
)
def test_accepts_what_the_links_demand(links, starts, tensor_starts):
    schedule = on_links(links, starts, tensor_starts)
    dj.simulator.validate(
        LINKED, schedule, LINKED_COSTS, objective=dj.Objective(links), tolerance=0
    )


@pytest.mark.parametrize(
    ("links", "starts", "tensor_starts", "message"),
    [
        (
            "parallel",
            [5, 9, 6],
            [1, 5, 1.75],
            "tensor 1 .* should start at 2 s, when parallel links",
        ),
        ("serial", [5, 7, 6], [1, 2, 1.75], "tensor 1 .* should start at 5 s"),
        ("serial", [5, 10, 6], [1, 6, 1.75], "tensor 1 .* should start at 5 s"),
        ("serial", [10, 6, 7], [6, 2, 1.75], "tensor 0 .* should start at 1 s"),
        (
            "duplex",
            [5, 9, 6],
            [1, 5, 1.75],
            "tensor 2 .* should start at 5 s, when duplex links",
        ),
        ("duplex", [5, 13.5, 9.5], [1, 9.5, 5.5], "tensor 2 .* should start at 5 s"),
        ("duplex", [5, 9, 13], [1, 5, 9], r"tensor 2 .* \(9 to 13 s\) should start at 5 s"),
    ],
)
def test_refuses_what_the_links_forbid(links, starts, tensor_starts, message):
    schedule = on_links(links, starts, tensor_starts)
    with pytest.raises(ValueError, match=message):
        dj.simulator.validate(
            LINKED, schedule, LINKED_COSTS, objective=dj.Objective(links), tolerance=0
        )


def test_graph_inputs_are_transfers_too():
    late = on_links("serial", [5, 9, 6], [1, 5, 1.75], input_start=-0.25)
    with pytest.raises(ValueError, match=r"graph input 0 from device 0 to 2 .* before time 0"):
        dj.simulator.validate(LINKED, late, LINKED_COSTS, objective=dj.Objective("serial"))
    late = on_links("serial", [5, 9, 6], [1, 5, 1.75], input_start=0.25)
    with pytest.raises(
        ValueError, match=r"task 2 .* before transfer of graph input 0 .* to 0.75 s\) ends"
    ):
        dj.simulator.validate(LINKED, late, LINKED_COSTS, objective=dj.Objective("serial"))
    legal = on_links("serial", [5, 9, 6], [1, 5, 1.75])
    bare = with_transfers(legal, np.flatnonzero(legal.transfer_tensor >= 0))
    dj.simulator.validate(LINKED, bare)  # a measured trace may leave them out
    with pytest.raises(ValueError, match="graph input 0 has no transfer to device 2"):
        dj.simulator.validate(LINKED, bare, LINKED_COSTS, objective=dj.Objective("serial"))
    with pytest.raises(
        ValueError, match=r"task 3 .* before transfer of tensor 0 .* \(1 to 5 s\) ends"
    ):
        dj.simulator.validate(LINKED, on_links("serial", [4, 9, 6], [1, 5, 1.75]), LINKED_COSTS)
    from_elsewhere = change(legal, transfer_source={0: 1})
    with pytest.raises(ValueError, match=r"graph input 0 .* does not leave from device 0"):
        dj.simulator.validate(LINKED, from_elsewhere)
    unknown = change(legal, transfer_tensor={0: -2})
    with pytest.raises(ValueError, match=r"transfer_tensor\[0\] is -2"):
        dj.simulator.validate(LINKED, unknown)
