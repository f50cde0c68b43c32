import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doppler_jax.objective import LINKS
from doppler_jax.simulator.memory import check_capacity, peak_memory_bytes, residency
from doppler_jax.simulator.oracle import simulate_oracle
from doppler_jax.types import RESIDENT
from tests.generators import problems
from tests.simulator.cases import small_problem, with_transfers


def stays(graph, costs, schedule, *results):
    """{(item, device): (from, until)} of what lies in memory."""
    held = residency(graph, costs, schedule, *results)
    columns = (held.item, held.device, held.from_s, held.until_s)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {(x, d): (begin, end) for x, d, begin, end in rows}


# Tensor 0 (4 bytes) is read by task 1 here and task 2 there, tensor 1 (2 bytes) by task 2 from
# task 1; tensor 2 (1 byte) is the result. Device 0 runs task 0 to 1 s and task 1 to 3 s.
GRAPH, COSTS = small_problem([1, 2, 1], [(0, 4, [1, 2]), (1, 2, [2]), (2, 1, [])], 2)


def test_what_lies_where_and_when():
    schedule = simulate_oracle(GRAPH, COSTS, [0, 0, 1])
    assert stays(GRAPH, COSTS, schedule) == {
        (0, 0): (0, 5),  # until its transfer, from 1 to 5 s, ends
        (1, 0): (1, 5),  # likewise, from 3 to 5 s
        (2, 1): (5, np.inf),
        (0, 1): (1, 6),
        (1, 1): (3, 6),
    }
    assert peak_memory_bytes(GRAPH, COSTS, schedule).tolist() == [6, 7]


def test_the_link_decides_how_long_a_tensor_stays():
    schedule = simulate_oracle(GRAPH, COSTS, [0, 0, 1], links="serial")
    held = stays(GRAPH, COSTS, schedule)
    assert held[1, 0] == (1, 7)  # its transfer runs from 5 to 7 s
    assert held[1, 1] == (5, 8)
    assert held[0, 0] == (0, 5)


def test_memory_is_freed_before_it_is_allocated():
    # Three tasks in a row make 4 bytes each; at 2 s the first tensor goes, the third comes.
    graph, costs = small_problem([1, 1, 1], [(0, 4, [1]), (1, 4, [2]), (2, 4, [])], 1)
    assert peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, [0, 0, 0])) == [8]


def test_graph_inputs_at_home_and_everywhere():
    # Input 0 (5 bytes) goes from device 1 to 0, input 1 (8) is resident, nobody reads input 2.
    inputs = [(1, 5, [0]), (RESIDENT, 8, [0, 1]), (0, 100, []), (1, 3, [1])]
    graph, costs = small_problem([1, 2, 1], [], 2, inputs)
    schedule = simulate_oracle(graph, costs, [0, 1, 1])
    assert stays(graph, costs, schedule) == {
        (-1, 1): (0, 5),
        (-1, 0): (0, 6),
        (-2, 0): (0, np.inf),
        (-2, 1): (0, np.inf),
        (-4, 1): (0, 2),
    }
    assert peak_memory_bytes(graph, costs, schedule).tolist() == [13, 16]
    # What a caller is given stays where it is at home, read or not.
    kept = stays(graph, costs, schedule, {~0, ~2})
    assert kept[-1, 1] == kept[-3, 0] == (0, np.inf)
    assert kept[-1, 0] == (0, 6)


def test_two_generations_of_state():
    # Task 1 makes the next state (5 bytes), which task 2 reads elsewhere, and 2 bytes beside;
    # task 0 reads the state there, and nothing reads that of 7 bytes, which task 2 makes.
    graph, costs = small_problem(
        [1, 1, 1],
        [(0, 3, [1]), (1, 5, [2]), (1, 2, [2]), (2, 7, [])],
        2,
        [(RESIDENT, 5, [0]), (RESIDENT, 7, [])],
    )
    graph = graph.replace(input_maker=np.array([1, 2]))
    schedule = simulate_oracle(graph, costs, [0, 0, 1])
    assert stays(graph, costs, schedule) == {
        (-1, 0): (0, np.inf),  # read last at 1 s
        (-2, 1): (0, np.inf),  # never read
        (0, 0): (0, 2),
        (1, 0): (1, np.inf),  # sent until 7 s
        (2, 0): (1, 4),
        (1, 1): (2, 8),
        (2, 1): (2, 8),
        (3, 1): (7, np.inf),
    }
    assert peak_memory_bytes(graph, costs, schedule).tolist() == [15, 21]
    # All in one place: both states before and both behind, beside what was made between.
    assert peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, [0, 0, 0]))[0] == 26
    check_capacity(graph, costs.replace(capacity_bytes=np.array([3.0, 21.0])))
    with pytest.raises(ValueError, match="task 2 needs 21 bytes"):
        check_capacity(graph, costs.replace(capacity_bytes=np.array([20.0, 20.0])))
    with pytest.raises(ValueError, match=r"carried graph inputs are 12 .* results 12; .* 23"):
        check_capacity(graph, costs.replace(capacity_bytes=np.array([2.0, 21.0])))


def test_results_that_are_named_stay_and_no_others():
    schedule = simulate_oracle(GRAPH, COSTS, [0, 0, 1])
    held = stays(GRAPH, COSTS, schedule, {0})
    assert held[0, 0] == (0, np.inf)
    assert held[2, 1] == (5, schedule.finish_s[2])
    assert held[0, 1] == (1, 6)


def test_what_never_starts_takes_no_memory():
    compute_s = COSTS.compute_s.copy()
    compute_s[1, 0] = np.inf
    costs = COSTS.replace(compute_s=compute_s)
    schedule = simulate_oracle(GRAPH, costs, [0, 0, 1])
    # Tensor 0 waits for ever, here and there; task 1 holds its own, task 2 never comes.
    assert peak_memory_bytes(GRAPH, costs, schedule).tolist() == [6, 4]


def test_a_missing_transfer_is_refused():
    bare = with_transfers(simulate_oracle(GRAPH, COSTS, [0, 0, 1]))
    with pytest.raises(ValueError, match="no transfer of tensor 0 to device 1"):
        peak_memory_bytes(GRAPH, COSTS, bare)


def bytes_at(graph, costs, schedule, device, now):
    """What lies on a device just after an instant, one rule at a time."""
    total, placement = 0.0, schedule.placement
    ends = {}  # last transfer of each item from a device
    copies = {}  # start of the transfer to this device
    for k, x in enumerate(schedule.transfer_tensor.tolist()):
        if schedule.transfer_source[k] == device:
            ends[x] = max(ends.get(x, 0.0), schedule.transfer_finish_s[k])
        if schedule.transfer_destination[k] == device:
            copies[x] = schedule.transfer_start_s[k]
    for i in range(graph.num_inputs):
        readers = graph.input_edge_reader[graph.input_edge_input == i]
        here = readers[placement[readers] == device]
        last = max([ends.get(~i, 0.0), *schedule.finish_s[here]])
        home = graph.homes(placement)[i]
        if graph.input_maker[i] >= 0 and home == device:
            total += costs.input_bytes[i]
        elif home == RESIDENT:
            total += costs.input_bytes[i] * bool(here.size)
        elif home == device or ~i in copies:
            total += costs.input_bytes[i] * (copies.get(~i, 0.0) <= now < last)
    for x in range(graph.num_tensors):
        readers = graph.edge_reader[graph.edge_tensor == x]
        here = readers[placement[readers] == device]
        last = max([ends.get(x, 0.0), *schedule.finish_s[here]])
        producer = graph.tensor_producer[x]
        if placement[producer] == device:
            is_state = (graph.input_maker == producer) & (
                costs.input_bytes == costs.tensor_bytes[x]
            )
            last = last if readers.size and not is_state.any() else np.inf
            total += costs.tensor_bytes[x] * (schedule.start_s[producer] <= now < last)
        elif x in copies:
            total += costs.tensor_bytes[x] * (copies[x] <= now < last)
    return total


@settings(max_examples=60, deadline=None)
@given(problems(max_tasks=15), st.sampled_from(LINKS))
def test_the_peak_is_that_of_a_scan_over_all_instants(problem, links):
    graph, costs, placement, options = problem
    schedule = simulate_oracle(graph, costs, placement, links=links, **options)
    times = np.unique([0.0, *schedule.start_s, *schedule.finish_s, *schedule.transfer_start_s])
    expected = [
        max(bytes_at(graph, costs, schedule, d, now) for now in times)
        for d in range(costs.num_devices)
    ]
    found = peak_memory_bytes(graph, costs, schedule)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_capacity_suffices():
    check_capacity(GRAPH, COSTS.replace(capacity_bytes=np.array([6.0, 7.0])))
    check_capacity(GRAPH, COSTS.replace(capacity_bytes=np.array([0.0, 7.0])))


def test_a_task_that_fits_nowhere_is_refused():
    # Task 2 holds operands of 4 and 2 bytes and makes 1.
    with pytest.raises(ValueError, match=r"task 2 needs 7 bytes .* can run it has 6.5"):
        check_capacity(GRAPH, COSTS.replace(capacity_bytes=np.array([6.5, 1.0])))
    compute_s = COSTS.compute_s.copy()
    compute_s[2, 1] = np.inf
    pinned = COSTS.replace(compute_s=compute_s, capacity_bytes=np.array([6.5, 9.0]))
    with pytest.raises(ValueError, match="task 2 needs 7 bytes"):
        check_capacity(GRAPH, pinned)


def test_inputs_that_fit_nowhere_are_refused():
    inputs = [(1, 5, [0]), (1, 5, [1]), (RESIDENT, 8, [0]), (RESIDENT, 8, [1]), (0, 99, [])]
    graph, costs = small_problem([1, 1], [], 2, inputs)
    check_capacity(graph, costs.replace(capacity_bytes=np.array([13.0, 13.0])))
    with pytest.raises(ValueError, match="of 10 bytes lie on device 1, which has 9"):
        check_capacity(graph, costs.replace(capacity_bytes=np.array([13.0, 9.0])))
    with pytest.raises(ValueError, match=r"carried graph inputs are 16 .* together have 15.5"):
        check_capacity(graph, costs.replace(capacity_bytes=np.array([0.0, 15.5])))


def test_results_that_fit_nowhere_together_are_refused():
    # Both tasks' results stay, 6 and 7 bytes, beside 2 bytes that both may read at one place.
    graph, costs = small_problem(
        [1, 1, 1], [(0, 6, []), (1, 7, []), (2, 5, [1])], 2, [(RESIDENT, 2, [0, 1])]
    )
    check_capacity(graph, costs.replace(capacity_bytes=np.array([1.0, 14.0])))
    with pytest.raises(
        ValueError, match=r"are 2 bytes and results 13; all .* together have 14"
    ):
        check_capacity(graph, costs.replace(capacity_bytes=np.array([0.0, 14.0])))
