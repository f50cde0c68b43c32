"""What is compiled, once, and what `compile` refuses."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import doppler_jax as dj
from doppler_jax.engine import ops
from doppler_jax.programs.evaluate import evaluate
from tests.commands import printed
from tests.kernels.conftest import X, build, random_program


@pytest.fixture
def count_compiles(monkeypatch):
    compiled = []
    lower = ops._lower

    def record(kernel, device, donated):
        compiled.append((kernel, device))
        return lower(kernel, device, donated)

    monkeypatch.setattr(ops, "_lower", record)
    return compiled


def test_compiles_each_kernel_once_per_device(count_compiles):
    sharded = random_program(0, 8)
    placement = np.arange(8) % 2
    devices = jax.devices()[:2]
    step = dj.compile(sharded, placement, devices=devices)
    wanted = {(k, devices[d]) for k, d in zip(sharded.kernels, placement, strict=True)}
    assert len(wanted) < 8
    assert len(count_compiles) == len(wanted) == len(set(count_compiles))
    assert step.compile_s > 0
    step(X)
    assert len(count_compiles) == len(wanted)


def test_shares_executables(count_compiles):
    sharded = random_program(0, 8)
    shared = dj.engine.LocalDevices()
    for mode in ("in_order", "work_conserving"):
        dj.compile(sharded, np.zeros(8, int), devices=shared, mode=mode)
    assert len(count_compiles) == len(set(sharded.kernels)) == len(shared.executables)
    assert set(count_compiles) == {(k, jax.devices()[0]) for k in sharded.kernels}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "eager"}, r"'eager'; local devices have: \['bulk.*', 'in_or.*', 'work_.*'\]"),
        ({"devices": []}, "devices is empty"),
        ({"devices": ["cpu:0"]}, r"s\[0\] is 'cpu:0'; expected a JAX device, or dj.ray_dev"),
        ({"devices": [0, "cpu:1"]}, r"s\[1\] is 'cpu:1'; expected a JAX device, or dj.ray_dev"),
        ({"devices": [0, 0]}, r"devices\[1\] is .*, which occurs before"),
        ({"placement": [0, 1]}, r"placement has shape \(2,\), expected \(3,\)"),
        ({"placement": [0, 2, 0]}, "puts task 1 on device 2; devices are 0 to 1"),
        ({"placement": [0, 1, -1]}, "puts task 2 on device -1"),
        ({"placement": [0.0, 1.0, 0.0]}, "placement must hold integers"),
        ({"timeout_s": 0}, "timeout_s is 0; expected a number above 0"),
        ({"out_device": 2}, "out_device is 2, but there are 2 devices"),
        ({"priority": [1], "queue": "priority"}, r"priority has shape \(1,\), expected \(3,\)"),
        ({"priority": [1, np.nan, 2], "queue": "in_order"}, r"priority\[1\] is nan"),
        ({"queue": "priority"}, "queue 'priority' needs a priority for every task"),
        ({"queue": "random"}, "the plan's queue is 'random'; expected one of"),
    ],
)
def test_refuses_bad_arguments_before_work(count_compiles, changes, message):
    ids = changes.get("devices", [0, 1])
    devices = [jax.devices()[i] if isinstance(i, int) else i for i in ids]
    options = {"placement": [0, 1, 0], **changes, "devices": devices}
    fields = ("placement", "priority", "queue")
    plan = dj.Plan(**{name: options.pop(name) for name in fields if name in options})
    with pytest.raises(ValueError, match=message):
        dj.compile(random_program(0, 3), plan, **options)
    assert count_compiles == []


def test_refuses_an_order_that_turns_a_precedence_round(count_compiles):
    sharded = build([("make", []), ("mean", ["t0", "i0"]), ("mean", ["t1", "i1"])], ["t2"])
    plan = dj.Plan([0, 1, 0], [0, 5, 3], "in_order")
    message = r"task 2 \(mean2, rank 3\) before task 1 \(mean1, rank 5\), from which it reads"
    with pytest.raises(ValueError, match=message):
        dj.compile(sharded, plan, devices=jax.devices()[:2])
    assert count_compiles == []


def test_refuses_to_compile_and_to_run_where_a_mesh_is_set(count_compiles):
    sharded, devices = build([("make", [])], ["t0"]), jax.devices()[:1]
    step = dj.compile(sharded, [0], devices=devices)
    count_compiles.clear()
    with jax.set_mesh(jax.make_mesh((2,), ("x",))):
        for use in (lambda: dj.compile(sharded, [0], devices=devices), lambda: step(X)):
            with pytest.raises(ValueError, match=r"a mesh is set by jax\.set_mesh"):
                use()
    assert count_compiles == []
    step(X)


def test_the_mode_and_the_order_follow_the_plan():
    sharded = build([("make", [])] * 3, ["t0", "t1", "t2"])
    devices, ranks = dj.engine.LocalDevices(jax.devices()[:1]), [2, 0, 1]

    def starts(plan, **options):
        step = dj.compile(sharded, plan, devices=devices, **options)
        step(X)
        return step.mode, np.argsort(step.schedule.start_s).tolist()

    for queue, mode in (("in_order", "in_order"), ("priority", "work_conserving")):
        assert starts(dj.Plan([0] * 3, ranks, queue)) == (mode, [1, 2, 0])
        other = {"in_order", "work_conserving"} - {mode}
        assert starts(dj.Plan([0] * 3, ranks, queue), mode=(m := other.pop())) == (m, [1, 2, 0])
    assert starts(dj.Plan([0] * 3, ranks, "fifo")) == ("work_conserving", [0, 1, 2])
    assert starts([0] * 3) == ("work_conserving", [0, 1, 2])
    assert starts([0] * 3, mode="in_order") == ("in_order", [0, 1, 2])
    costs = dj.make_costs(sharded.graph, dj.make_cluster("reference_x4"))
    placed = dj.place(sharded.graph, costs, method="heft", queue="in_order")
    step = dj.compile(sharded, placed, devices=jax.devices()[:4])
    assert (step.mode, step.plan.queue) == ("in_order", "in_order")
    np.testing.assert_array_equal(step.plan.priority, placed.priority)


@pytest.fixture
def events():
    """Counts JAX's events; afterwards the cache is what it was."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    counts = Counter()

    def count(event, **_):
        counts[event.rsplit("/")[-1]] += 1

    jax.monitoring.register_event_listener(count)
    yield counts
    jax.monitoring.unregister_event_listener(count)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_small_kernels_are_found_again(events, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # else a folder that is in use stays so
    sharded = random_program(1, 12)
    for wanted, other in (("cache_misses", "cache_hits"), ("cache_hits", "cache_misses")):
        # New functions, or else JAX knows them within this process.
        fresh = {
            k: dataclasses.replace(k, fn=lambda *operands, fn=k.fn: fn(*operands))
            for k in set(sharded.kernels)
        }
        program = dataclasses.replace(sharded, kernels=tuple(map(fresh.get, sharded.kernels)))
        events.clear()
        devices = jax.devices()[:2]
        step = dj.compile(program, np.arange(12) % 2, devices=devices, fuse_segments=True)
        assert events[wanted] > 1
        assert events[other] == 0
        np.testing.assert_allclose(step(X)["out"], evaluate(sharded, X)["out"], rtol=1e-5)
    assert any(tmp_path.iterdir())


PROCESS = """
import sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import doppler_jax as dj
from doppler_jax.programs.workloads import make_arrays, make_workload

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
workload = make_workload("llama_layer")
sharded = dj.partition(dj.trace(workload.fn, *workload.args), 4)
placement = np.arange(sharded.graph.num_tasks) % 2
step = dj.compile(sharded, placement, devices=jax.devices())
logits = step(*make_arrays(workload, jax.random.key(0)))
total = sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(logits))
print(total)
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_again(tmp_path):
    def run():
        total = float(printed("-c", PROCESS, tmp_path).splitlines()[-1])
        return total, {entry.name for entry in tmp_path.glob("*-cache")}

    first = run()
    assert len(first[1]) > 1
    assert run() == first
