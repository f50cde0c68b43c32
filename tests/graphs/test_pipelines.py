import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.build import check_costs
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.pipelines import LIMITS, SCHEDULES, hand_written, make_pipeline


def names_of_edges(pipeline):
    names = [name.removeprefix("stage") for name in pipeline.names]
    return {(names[u], names[v]) for u, v in zip(*task_edges(pipeline.graph), strict=True)}


@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (4, 8), (4, 2), (8, 16)])
@pytest.mark.parametrize("whole_backward", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_hand_written_schedules_take_what_their_authors_say(
    name, whole_backward, stages, batches
):
    pipeline = make_pipeline(stages, batches, whole_backward=whole_backward)
    if name == "zb_h1" and whole_backward:
        with pytest.raises(ValueError, match="two halves"):
            hand_written(name, pipeline)
        return
    placement, rank = hand_written(name, pipeline)
    schedule = dj.simulator.simulate_oracle(
        pipeline.graph, pipeline.costs, placement, queue="in_order", priority=rank
    )
    waits = stages - 1
    bubble_s = 3 * waits if whole_backward else 2 * waits
    if name == "zb_h1" and batches >= stages:
        bubble_s = waits
    if batches >= stages or name != "zb_h1":
        assert dj.simulator.makespan_s(schedule) == 3 * batches + bubble_s
    i = np.arange(stages)
    room = {"gpipe": batches + 0 * i, "1f1b": stages - i, "zb_h1": stages + 0 * i}
    peak = dj.simulator.peak_memory_bytes(pipeline.graph, pipeline.costs, schedule)
    assert (peak == np.minimum(room[name], batches)).all()


def test_two_stages_and_one_micro_batch():
    pipeline = make_pipeline(2, 1)
    assert names_of_edges(pipeline) == {
        *(("0.F_0", "1.F_0"), ("0.F_0", "0.B_0"), ("0.F_0", "0.W_0"), ("0.B_0", "0.W_0")),
        *(("1.F_0", "1.B_0"), ("1.F_0", "1.W_0"), ("1.B_0", "1.W_0"), ("1.B_0", "0.B_0")),
    }
    assert sorted(pipeline.graph.tensor_bytes)[-3:] == [0, 1, 1]
    whole = make_pipeline(2, 1, whole_backward=True, pinned=False)
    assert names_of_edges(whole) == {
        *(("0.F_0", "1.F_0"), ("0.F_0", "0.BW_0"), ("1.F_0", "1.BW_0"), ("1.BW_0", "0.BW_0")),
    }
    assert whole.costs.compute_s.tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("limit", "room"), [*zip(LIMITS, ([np.inf] * 3, [3] * 3, [3, 2, 1]), strict=True)]
)
def test_costs_pin_stages_and_limit_activations(limit, room):
    pipeline = make_pipeline(3, 2, limit=limit, latency_s=0.1)
    check_costs(pipeline.graph, pipeline.costs)
    assert pipeline.costs.capacity_bytes.tolist() == room
    able = np.isfinite(pipeline.costs.compute_s)
    assert [able_on.tolist() for able_on in able] == [
        [d == stage for d in range(3)] for _, stage, _ in pipeline.tasks
    ]
    assert pipeline.costs.latency_s.tolist() == (0.1 * (1 - np.eye(3))).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 0, "num_micro_batches": 2}, "num_stages is 0"),
        ({"num_stages": 2, "num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"num_stages": 2, "num_micro_batches": 2, "limit": "Q"}, "unknown limit 'Q'"),
    ],
)
def test_what_is_no_pipeline_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_pipeline(**options)
    with pytest.raises(ValueError, match="unknown schedule 'mine'; known: gpipe, 1f1b, zb_h1"):
        hand_written("mine", make_pipeline(1, 1))
