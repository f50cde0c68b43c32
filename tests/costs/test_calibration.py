"""Calibrations: their file, the costs that they give, what executions teach them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.calibration import Calibration, KernelTime
from doppler_jax.costs.calls import CallCosts
from doppler_jax.costs.digests import kernel_digests
from doppler_jax.costs.handling import as_transfers, task_handling_s
from doppler_jax.costs.observed import fit_line, observe, refit_costs
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.types import Kernel
from tests.generators import free_costs, make_schedule, small_graph


def layer(w, x):
    return jnp.tanh(x @ w) @ w


def make_program():
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return dj.partition(dj.trace(layer, square, square), 2, strategy="uniform")


@pytest.fixture(scope="module")
def sharded():
    return make_program()


@pytest.fixture
def calibration(sharded):
    """Two devices, the second slower; links of 10 us and 1e8 bytes/s, back half as fast."""
    digests = kernel_digests(sharded.kernels)
    kernels = {
        digest: KernelTime(kernel.name, (1e-4 * (k + 1), 2e-4 * (k + 1)), 0.1)
        for k, (kernel, digest) in enumerate(digests.items())
    }
    transfers = {(s, 1 - s, b): (1 + s) * (1e-5 + b * 1e-8) for s in (0, 1) for b in (64, 1024)}
    return Calibration(
        backend="local",
        device_names=("a", "b"),
        capacity_bytes=np.array([1e9, np.inf]),
        overhead_s=np.array([1e-5, np.nan]),
        kernels=kernels,
        transfers=transfers,
        transfer_noise=float("nan"),
        calls=CallCosts(*np.linspace(0.0, 1e-3, 8).tolist()),
    )


def test_a_file_brings_a_calibration_back(tmp_path, calibration):
    path = tmp_path / "here.json"
    dj.clusters.save_calibration(path, calibration)
    found = dj.clusters.load_calibration(path)
    for field in dataclasses.fields(Calibration):
        np.testing.assert_equal(getattr(found, field.name), getattr(calibration, field.name))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "doppler_jax.cluster", "field 'format': expected 'doppler_jax.calibration'"),
        ("overhead_s", [1.0, "x"], r"overhead_s\[1\] is 'x'"),
        ("transfers", [[0, 2, 8, 1]], r"transfers: \[0.0, 2.0, 8.0, 1.0\]"),
        ("transfers", [[0, 1, 8]], r"transfers: \[0.0, 1.0, 8.0\]"),
        ("calls", [1.0], r"calls is \[1.0\]; expected nothing or 8 numbers"),
        ("handling", [[1, 1, 8, 1]], r"handling: \[1.0, 1.0, 8.0, 1.0\] is not two of 2 dev"),
        ("kernels", {"k": {"name": "k"}}, r"kernels\['k'\] is .* expected \['name', 'noise'"),
        ("device_names", 3, "device_names must be a list"),
        ("capacity_bytes", [1.0], "capacity_bytes has 1 entries for 2 devices"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, calibration, field, value, message):
    path = tmp_path / "here.json"
    dj.clusters.save_calibration(path, calibration)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ValueError, match=message) as caught:
        dj.clusters.load_calibration(path)
    assert str(caught.value).startswith(str(path))


def test_costs_are_the_measured_seconds_of_each_tasks_kernel(sharded, calibration):
    costs = dj.make_costs(sharded, calibration)
    digests = kernel_digests(sharded.kernels)
    for v, kernel in enumerate(sharded.kernels):
        assert tuple(costs.compute_s[v]) == calibration.kernels[digests[kernel]].seconds
    np.testing.assert_allclose(costs.latency_s, [[0, 1e-5], [2e-5, 0]])
    np.testing.assert_allclose(costs.seconds_per_byte, [[0, 1e-8], [2e-8, 0]])
    assert costs.capacity_bytes.tolist() == [1e9, np.inf]


def test_kernels_are_known_again_and_traced_once_for_that(calibration, sharded, monkeypatch):
    one, other = (dj.make_costs(make_program(), calibration) for _ in range(2))
    np.testing.assert_array_equal(one.compute_s, other.compute_s)
    before = kernel_digests(sharded.kernels)
    monkeypatch.setattr(jax, "make_jaxpr", None)
    assert kernel_digests(sharded.kernels) == before


def test_digests_tell_functions_and_shapes_apart():
    def kernel(fn, size):
        vector = jax.ShapeDtypeStruct((size,), jnp.float32)
        return Kernel("same", lambda a: (fn(a),), (vector,), (vector,))

    kernels = [kernel(jnp.sin, 4), kernel(jnp.sin, 4), kernel(jnp.sin, 8), kernel(jnp.cos, 4)]
    first, second, *others = kernel_digests(kernels).values()
    assert first == second
    assert len({first, *others}) == 3


def test_what_a_calibration_cannot_tell_is_named(sharded, calibration):
    gone, *_ = calibration.kernels
    kernels = {k: t for k, t in calibration.kernels.items() if k != gone}
    name = calibration.kernels[gone].name
    with pytest.raises(ValueError, match=rf"1 of the program's \d+ kernels .* {name}; calib"):
        dj.make_costs(sharded, dataclasses.replace(calibration, kernels=kernels))
    with pytest.raises(ValueError, match="give the program, not its graph"):
        dj.make_costs(sharded.graph, calibration)
    one_way = {link: y for link, y in calibration.transfers.items() if link[0] == 0}
    with pytest.raises(ValueError, match="from device 1 to device 0"):
        dj.make_costs(sharded, dataclasses.replace(calibration, transfers=one_way))


def simulated_traces(sharded, costs, seeds=range(4), links="serial"):
    size = len(seeds), sharded.graph.num_tasks
    placements = np.random.default_rng(0).integers(0, 2, size)
    return [
        dj.simulator.simulate_oracle(sharded.graph, costs, p, links=links) for p in placements
    ]


def test_refitting_finds_the_costs_that_executions_had(sharded, calibration):
    handling = {(d, 1 - d, b): 1e-6 * (d + 1) + b * 1e-10 for d in (0, 1) for b in (64, 1024)}
    believed = dj.make_costs(sharded, dataclasses.replace(calibration, handling=handling))
    np.testing.assert_allclose(believed.handling_s, [1e-6, 2e-6])
    np.testing.assert_allclose(believed.handling_s_per_byte, 1e-10)
    truth = believed.replace(compute_s=believed.compute_s * 3.0)
    found = dj.costs.refit_costs(sharded, believed, simulated_traces(sharded, truth)[:3])
    # Handling is not taken for the tasks.
    np.testing.assert_allclose(found.compute_s, truth.compute_s, rtol=1e-9)
    np.testing.assert_array_equal(found.handling_s, believed.handling_s)


def test_where_devices_spend_nothing_handling_is_nothing(sharded, calibration):
    idle = {(d, 1 - d, 64): 0.0 for d in (0, 1)}
    costs = dj.make_costs(sharded, dataclasses.replace(calibration, handling=idle))
    assert costs.handling_s.tolist() == costs.handling_s_per_byte.tolist() == [0.0, 0.0]
    assert dj.make_costs(sharded, calibration).handling_s is None


def test_a_task_pays_for_what_it_sends_and_the_first_reader_for_what_comes():
    # Tensor 0 of task 0 (8 bytes) is read by tasks 1 and 2 on device 1, and by 3 on device 2.
    tensors = [(0, 8.0, [2, 1, 3]), (1, 4.0, [4])]
    graph = small_graph([1.0] * 5, tensors)
    costs = dj.make_costs(graph, dj.make_cluster("p100x4"))
    each_s, per_byte = np.array([[1.0, 10.0, 100.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    costs = costs.replace(handling_s=each_s, handling_s_per_byte=per_byte)
    placement = np.array([0, 1, 1, 2, 1])
    found = task_handling_s(graph, costs, placement)
    assert found.tolist() == [2 * (1.0 + 8.0), 10.0, 0.0, 100.0, 0.0]
    # Nobody pays for sending a graph input: from device 0, and from where task 3 runs.
    inputs = [
        (0, 2.0, [1, 2]),
        (dj.graphs.RESIDENT, 3.0, [0, 3]),
        (dj.graphs.RESIDENT, 9.0, [4]),
    ]
    graph = small_graph([1.0] * 5, tensors, inputs).replace(input_maker=np.array([-1, 3, -1]))
    costs = costs.replace(input_bytes=graph.input_bytes)
    found = task_handling_s(graph, costs, placement)
    assert found.tolist() == [18.0 + 1.0 + 3.0, 20.0, 0.0, 100.0, 0.0]


def test_methods_without_handling_see_longer_transfers():
    graph, costs = dj.from_edge_delays([1.0, 1.0, 1.0], [(0, 1, 2.0), (0, 2, 2.0)], 3)
    each_s, per_byte = np.array([[1.0, 2.0, 4.0], [0.5, 0.0, 0.0]])
    spent = costs.replace(handling_s=each_s, handling_s_per_byte=per_byte)
    found = as_transfers(spent)
    assert found.handling_s is None
    assert found.latency_s.tolist() == [[0, 3, 5], [3, 0, 6], [5, 6, 0]]
    assert found.seconds_per_byte.tolist() == [[0, 1.5, 1.5], [1.5, 0, 1], [1.5, 1, 0]]
    links = pad_problem(graph, spent).links
    np.testing.assert_array_equal(links, (found.latency_s, found.seconds_per_byte))
    assert as_transfers(costs) is costs
    # Critical path places by them: to move is not worth 3 s of latency for 1 s of work.
    assert dj.place(graph, spent, method="critical_path").placement.tolist() == [0, 0, 0]


def test_refitting_takes_the_time_to_dispatch_for_the_tasks(sharded, calibration):
    costs = dj.make_costs(sharded, calibration)
    traces = simulated_traces(sharded, costs)
    late = [trace.replace(start_s=trace.start_s + 1e-6) for trace in traces]
    overheads = [y for row in observe(sharded, late).overheads.values() for y in row]
    np.testing.assert_allclose(overheads, 1e-6, rtol=1e-6)
    found = dj.costs.refit_costs(sharded, costs, late)
    np.testing.assert_allclose(found.compute_s, costs.compute_s)


@pytest.mark.parametrize("placement", [[0, 1], [2] * 20])
def test_refitting_refuses_traces_of_other_programs_or_devices(sharded, calibration, placement):
    n = sharded.graph.num_tasks
    placement = np.array(placement[:n] if len(placement) > 2 else placement)
    trace = make_schedule(placement, *np.zeros((2, len(placement))))
    with pytest.raises(ValueError, match=f"expected {n} tasks on 2 devices"):
        dj.costs.refit_costs(sharded, dj.make_costs(sharded, calibration), [trace])


def test_a_line_ignores_an_odd_transfer_and_never_falls():
    sizes = np.array([256.0, 1e3, 1e4, 1e5, 1e6, 1e7])
    seconds = 1e-4 + sizes * 1e-9
    assert fit_line(sizes, seconds) == pytest.approx((1e-4, 1e-9))
    odd = seconds.copy()
    odd[0] *= 8
    assert fit_line(sizes, odd) == pytest.approx((1e-4, 1e-9), rel=0.01)
    latency_s, seconds_per_byte = fit_line(sizes, seconds[::-1])
    assert latency_s > 0
    assert seconds_per_byte == 0
    assert fit_line(np.array([0.0]), np.array([2e-4])) == pytest.approx((2e-4, 0.0))


SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
PROGRAM = dj.trace(lambda a, b, c: jnp.tanh(a @ b) @ c, SQUARE, SQUARE, SQUARE)
SHARDED = dj.partition(PROGRAM, num_shards=2, strategy="uniform")
GRAPH = SHARDED.graph
N = GRAPH.num_tasks
FLAT = 1 - np.eye(3)
TRUE = free_costs(
    GRAPH, np.full((N, 3), [2.0, 3.0, 4.0]), latency_s=0.5 * FLAT, seconds_per_byte=1e-3 * FLAT
)


def simulated(placement, costs=TRUE):
    return dj.simulator.simulate_oracle(GRAPH, costs, np.asarray(placement), links="serial")


def falsified(compute=1.0, latency=1.0, per_byte=1.0):
    factors = {"compute_s": compute, "latency_s": latency, "seconds_per_byte": per_byte}
    return TRUE.replace(
        **{name: getattr(TRUE, name) * factor for name, factor in factors.items()}
    )


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_false_costs_of_handling_are_put_right(factor):
    """The engine's traces have it between tasks, the simulator's in them."""
    true = TRUE.replace(handling_s=np.array([0.3, 0.2, 0.1]), handling_s_per_byte=np.zeros(3))
    rng = np.random.default_rng(0)
    traces = []
    for _ in range(12):
        placement = rng.integers(0, 3, N)
        trace = simulated(placement, true)
        delay_s = task_handling_s(GRAPH, true, placement)
        traces.append(dataclasses.replace(trace, start_s=trace.start_s + delay_s))
    believed = true.replace(handling_s=true.handling_s * factor)
    found = refit_costs(SHARDED, believed, traces)
    largest = GRAPH.tensor_bytes.max()
    spent_s = found.handling_s + largest * found.handling_s_per_byte
    np.testing.assert_allclose(spent_s, true.handling_s, rtol=0.05)
    np.testing.assert_allclose(found.compute_s, true.compute_s, rtol=0.1)
    few = refit_costs(SHARDED, believed, traces[:3])
    np.testing.assert_array_equal(few.handling_s, believed.handling_s)
    assert refit_costs(SHARDED, TRUE, traces).handling_s is None


def test_none_and_exact_executions_change_nothing():
    assert refit_costs(SHARDED, TRUE, []) is TRUE
    found = refit_costs(SHARDED, TRUE, [simulated(np.arange(N) % 3)])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(TRUE), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_false_costs_of_transfers_are_put_right(factor):
    """Links that carried nothing are taken to be as false as those that did."""
    believed = falsified(latency=factor, per_byte=factor)
    trace = simulated(np.arange(N) % 2)
    links = np.stack([trace.transfer_source, trace.transfer_destination], axis=1).tolist()
    assert set(map(tuple, links)) == {(0, 1), (1, 0)}
    found = refit_costs(SHARDED, believed, [trace])
    for size in np.unique(GRAPH.tensor_bytes):
        found_s, true_s = (c.latency_s + size * c.seconds_per_byte for c in (found, TRUE))
        np.testing.assert_allclose(found_s, true_s, rtol=1e-6)


def test_false_costs_of_tasks_are_put_right():
    """Every kernel runs on device 0; a device that ran nothing is scaled as that one."""
    believed = falsified(compute=np.array([3.0, 5.0, 3.0]))
    found = refit_costs(SHARDED, believed, [simulated(np.zeros(N, int))])
    np.testing.assert_allclose(found.compute_s[:, [0, 2]], TRUE.compute_s[:, [0, 2]], rtol=1e-6)
    np.testing.assert_allclose(found.compute_s[:, 1], TRUE.compute_s[:, 1] * 5 / 3, rtol=1e-6)
    np.testing.assert_array_equal(found.latency_s, TRUE.latency_s)


def test_an_outlier_among_executions_does_not_count():
    slow = falsified(compute=50.0)
    traces = [simulated(np.zeros(N, int), costs) for costs in (TRUE, slow, TRUE)]
    found = refit_costs(SHARDED, TRUE, traces)
    np.testing.assert_allclose(found.compute_s, TRUE.compute_s, rtol=1e-6)


def test_where_a_task_cannot_run_stays_so():
    forbidden = TRUE.compute_s.copy()
    forbidden[0, 1] = np.inf
    believed = dataclasses.replace(TRUE, compute_s=forbidden)
    found = refit_costs(SHARDED, believed, [simulated(np.zeros(N, int))])
    assert np.isinf(found.compute_s[0, 1])
    assert np.isfinite(found.compute_s).sum() == 3 * N - 1


def test_links_believed_free_get_what_was_seen():
    free = falsified(latency=0.0, per_byte=0.0)
    found = refit_costs(SHARDED, free, [simulated(np.arange(N) % 2)])
    size = GRAPH.tensor_bytes.max()
    assert found.latency_s[0, 1] + size * found.seconds_per_byte[0, 1] > 0.5
