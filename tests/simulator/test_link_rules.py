import numpy as np
import pytest

import doppler_jax as dj
from tests.simulator.cases import change, small_problem, with_transfers

# Tasks 0 and 1 on device 0 (ending at 1 and 2 s) and task 2 on device 2 (ending at 1.75 s,
# its graph input takes half a second) each send a tensor to device 1, which takes 4 s.
LINKED, LINKED_COSTS = small_problem(
    [1, 1, 1.25, 1, 1, 1], [(0, 4, [3]), (1, 4, [4]), (2, 4, [5])], 3, [(0, 0.5, [2])]
)
LINKED_PLACEMENT = [0, 0, 2, 1, 1, 1]


def on_links(links, starts, tensor_starts, input_start=0.0):
    """The schedule with these starts of tasks 3 to 5, of tensors 0 to 2 and of the input."""
    legal = dj.simulate_oracle(LINKED, LINKED_COSTS, LINKED_PLACEMENT, links=links)
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
    dj.validate(LINKED, schedule, LINKED_COSTS, objective=dj.Objective(links), tolerance=0)


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
        dj.validate(LINKED, schedule, LINKED_COSTS, objective=dj.Objective(links), tolerance=0)


def test_graph_inputs_are_transfers_too():
    late = on_links("serial", [5, 9, 6], [1, 5, 1.75], input_start=-0.25)
    with pytest.raises(ValueError, match=r"graph input 0 from device 0 to 2 .* before time 0"):
        dj.validate(LINKED, late, LINKED_COSTS, objective=dj.Objective("serial"))
    late = on_links("serial", [5, 9, 6], [1, 5, 1.75], input_start=0.25)
    with pytest.raises(
        ValueError, match=r"task 2 .* before transfer of graph input 0 .* to 0.75 s\) ends"
    ):
        dj.validate(LINKED, late, LINKED_COSTS, objective=dj.Objective("serial"))
    legal = on_links("serial", [5, 9, 6], [1, 5, 1.75])
    bare = with_transfers(legal, np.flatnonzero(legal.transfer_tensor >= 0))
    dj.validate(LINKED, bare)  # a measured trace may leave them out
    with pytest.raises(ValueError, match="graph input 0 has no transfer to device 2"):
        dj.validate(LINKED, bare, LINKED_COSTS, objective=dj.Objective("serial"))
    with pytest.raises(
        ValueError, match=r"task 3 .* before transfer of tensor 0 .* \(1 to 5 s\) ends"
    ):
        dj.validate(LINKED, on_links("serial", [4, 9, 6], [1, 5, 1.75]), LINKED_COSTS)
    from_elsewhere = change(legal, transfer_source={0: 1})
    with pytest.raises(ValueError, match=r"graph input 0 .* does not leave from device 0"):
        dj.validate(LINKED, from_elsewhere)
    unknown = change(legal, transfer_tensor={0: -2})
    with pytest.raises(ValueError, match=r"transfer_tensor\[0\] is -2"):
        dj.validate(LINKED, unknown)
