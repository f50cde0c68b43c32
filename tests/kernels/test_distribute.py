"""`distribute`: a plan runs where its whole calls beat `jit`, and else `jit` does."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.calls import CallCosts
from doppler_jax.costs.digests import kernel_digests
from doppler_jax.engine import comparing, loop, planning, rivals
from doppler_jax.engine import distributed as distribute
from doppler_jax.engine.drift import WINDOW, Drift
from tests.commands import run_python

ARGS = {"w": jnp.linspace(-1.0, 1.0, 256).reshape(16, 16)}, jnp.ones((8, 16))


def fn(params, x, *, scale=1.0):
    return scale * jax.nn.relu(x @ params["w"]) @ params["w"]


pytestmark = pytest.mark.usefixtures("known_host")


@pytest.fixture
def planned(monkeypatch):
    """The seconds that each search for a plan was given."""
    budgets, place = [], planning.place

    def counting(*args, budget_s, **options):
        budgets.append(budget_s)
        return place(*args, budget_s=budget_s, **options)

    monkeypatch.setattr(planning, "place", counting)
    return budgets


def choosing(monkeypatch, wanted):
    def compare(rivals, until_s):
        name = next(name for name in rivals if name.startswith(wanted))
        return comparing.Compared(dict.fromkeys(rivals, (1.0,)), name)

    monkeypatch.setattr(distribute, "compare_calls", compare)


def distributed(**options):
    options = {"method": "critical_path", "budget_s": 5.0, "num_shards": 2, **options}
    return dj.distribute(fn, devices=jax.devices()[:2], **options)


RIVALS = "plan", "plan, fused", "jit on", "jit, sharded"


@pytest.mark.parametrize("wanted", RIVALS)
def test_what_wins_runs_and_returns_what_the_function_does(
    wanted, planned, monkeypatch, capsys, tmp_path
):
    choosing(monkeypatch, wanted)
    fast = distributed()
    for k in range(3):
        x = ARGS[1] * k
        np.testing.assert_allclose(fast(ARGS[0], x), fn(ARGS[0], x), rtol=1e-5, atol=1e-6)
    assert len(planned) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        "doppler_jax: fn: planning and comparing, for 5 s\n"
        rf"doppler_jax: fn: \d+ tasks, calibrated and placed in \d+.\d s; {wanted}.*\n",
        said,
    )
    assert fast.compared.chosen.startswith(wanted)
    assert (fast.plan is None) == wanted.startswith("jit")
    if wanted.startswith("plan"):
        assert len(fast.profile().device_names) == 2
        num_tasks, graph = fast.lower(*ARGS).sharded.graph.num_tasks, fast._latest.run.graph
        assert (graph.num_tasks < num_tasks) == (wanted == "plan, fused")
        dj.simulator.validate(
            graph, fast._latest.run.schedule, queue=fast.plan.queue,
            priority=fast.plan.priority,
        )  # fmt: skip
        fast.report(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        shown = {"planned by critical_path", "measured"} & set(re.findall(r"[\w ]+", page))
        assert len(shown) == (2 if wanted == "plan" else 1)  # fused tasks were not planned
    else:
        for ask in (fast.profile, lambda: fast.report(tmp_path / "page.html")):
            with pytest.raises(ValueError, match="no plan runs"):
                ask()


def test_calls_that_have_become_slower_are_told_once():
    for usual_s, first in ((1.0, []), (None, [1.0] * WINDOW)):
        drift = Drift(usual_s)
        calls = [*first, *[1.4] * WINDOW, *[1.6] * (3 * WINDOW)]
        told = [slow_s for slow_s in map(drift.note, calls) if slow_s is not None]
        assert told == [1.6]


def test_a_new_plan_has_to_beat_the_one_before(planned, monkeypatch, capsys):
    choosing(monkeypatch, "plan")
    fast = distributed()
    jax.block_until_ready(fast(*ARGS))
    before = fast._latest.run
    monkeypatch.setattr(Drift, "note", lambda drift, seconds: 2.0)
    fast(*ARGS)
    assert "calls have become slower: 2e+03 ms at the median, where" in capsys.readouterr().err
    fast.replan()
    choosing(monkeypatch, "plan before")
    np.testing.assert_allclose(fast(*ARGS), fn(*ARGS), rtol=1e-5, atol=1e-6)
    assert "calibrated and placed" in capsys.readouterr().err  # though both are kept
    assert len(planned) == 2
    assert fast._latest.run is before
    fast.replan()
    choosing(monkeypatch, "jit on")
    fast(*ARGS)
    assert fast.plan is None


@pytest.mark.parametrize("wanted", RIVALS)
def test_a_loop_feeds_its_state_back_whatever_won(wanted, monkeypatch):
    compare = distribute.compare_calls

    def really_comparing(rivals, *args):
        compare(rivals, *args)
        return next(comparing.Compared({}, name) for name in rivals if name.startswith(wanted))

    monkeypatch.setattr(distribute, "compare_calls", really_comparing)

    def train(state, x):
        grads = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(state["w"])
        mean = 0.9 * state["mean"] + grads
        return {**state, "w": state["w"] - mean, "mean": mean, "other": state["w"]}, abs(
            mean
        ).sum()

    fast = dj.distribute(
        train, devices=jax.devices()[:2], method="critical_path", budget_s=5.0, carry=0
    )
    zeros = jnp.zeros((16, 16))
    state = {"w": ARGS[0]["w"] + 0, "mean": zeros, "other": zeros, "table": ARGS[0]["w"]}
    plain = jax.tree.map(jnp.copy, state)
    for _ in range(4):
        before = state
        state, total = fast(state, ARGS[1])
        plain, expected = train(plain, ARGS[1])
        np.testing.assert_allclose(total, expected, rtol=1e-4)
    assert (fast.plan is None) == wanted.startswith("jit")
    assert before["mean"].is_deleted()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6),
        state,
        plain,
    )


def test_other_shapes_and_keywords_are_planned_anew(planned, monkeypatch):
    choosing(monkeypatch, "plan")
    fast = distributed()
    longer = jnp.ones((12, 16))
    for args, kwargs in (
        (ARGS, {}),
        ((ARGS[0], longer), {}),
        (ARGS, {"scale": 2.0}),
        (ARGS, {}),
    ):
        np.testing.assert_allclose(
            fast(*args, **kwargs), fn(*args, **kwargs), rtol=1e-5, atol=1e-6
        )
    assert len(planned) == 3


def test_it_really_compares_whole_calls():
    fast = distributed()
    np.testing.assert_allclose(fast(*ARGS), fn(*ARGS), rtol=1e-5, atol=1e-6)
    names = set(fast.compared.call_s)
    every = {name for name in names if name.startswith("jit, sharded")}
    rest = {"plan", f"jit on {jax.devices()[0]}"}
    assert 1 <= len(every) <= 2
    assert rest <= names - every <= {*rest, "plan, fused"}
    assert all(name in str(fast.compared) for name in names)
    assert all(min(times) > 0 for times in fast.compared.call_s.values())


def test_a_way_to_shard_that_fails_is_told(monkeypatch):
    def failing(*args):
        raise ValueError("it cannot be cut so")

    monkeypatch.setattr(distribute, "sharded_jits", lambda *_, **__: [("by rows", failing)])
    fast = distributed()
    fast(*ARGS)
    assert fast.compared.failed == {"by rows": "it cannot be cut so"}
    assert str(fast.compared).endswith("; by rows failed: it cannot be cut so")


@pytest.mark.parametrize(
    ("carry", "taken"),
    [
        ({"state": "out[0]"}, {"a", "b"}),
        ({"state['a']": "out[0]['a']"}, {"a"}),
        ({"state": "out[0]", "x": "out[1]"}, {"a", "b", "x"}),
    ],
)
def test_jit_takes_what_is_carried_and_nothing_else(carry, taken):
    def step(state, x):
        return {"a": state["a"] + x, "b": state["b"] * x}, x + 1

    def fresh():
        return {"a": jnp.arange(4.0), "b": jnp.ones(4)}, jnp.full(4, 2.0)

    sharded = dj.partition(dj.trace(step, *fresh(), carry=carry), 1)
    jitted, same = loop.jit_taking(step, sharded), jnp.ones(4)
    (state, x), expected = fresh(), step(*fresh())
    chex.assert_trees_all_equal(jitted(state, x), expected)
    found = {name for name, array in {**state, "x": x}.items() if array.is_deleted()}
    assert found == taken
    state, x = fresh()
    chex.assert_trees_all_equal(jitted(x=x, state=state), expected)
    expected = step({"a": same, "b": same}, same)
    chex.assert_trees_all_equal(jitted({"a": same, "b": same}, same), expected)


def cut_axes(outputs):
    """The axis along which each is cut over two devices; None: both have it all."""
    found = []
    for out in jax.tree.leaves(outputs):
        assert len(out.sharding.device_set) == 2
        shard = out.sharding.shard_shape(out.shape)
        found.append(next((k for k, n in enumerate(shard) if n != out.shape[k]), None))
    return found


@pytest.mark.parametrize(
    ("resident", "rows", "ways"),
    [
        (
            0,
            8,
            {"": [None, 0], " by rows": [0, 0], " by params": [0, None], " by x": [None, 1]},
        ),
        (None, 7, {"": [0, None], " by rows": [0, 1], " by x": [None, 1]}),
        (0, 7, {" by rows": [0, 1], " by params": [0, None], " by x": [None, 1]}),
    ],
)
def test_jit_is_sharded_over_what_divides_and_first_over_what_does_not_stay(
    resident, rows, ways
):
    devices = dj.engine.LocalDevices(jax.devices()[:2])
    args = ARGS[0], jnp.ones((rows, 16))
    sharded = dj.partition(dj.trace(fn, *args, resident=resident), 2)
    found = rivals.sharded_jits(
        lambda w, x: (w, x), sharded, devices, is_batch_told=resident is not None
    )
    seen = {name: cut_axes(run(*args)) for name, run in found}
    ways = {**ways, " by columns": [1, 1]}
    assert seen == {f"jit, sharded{way} over 2 devices": axes for way, axes in ways.items()}
    assert [*seen] == [f"jit, sharded{way} over 2 devices" for way in ways]


def test_a_state_stays_sharded_as_it_was(monkeypatch):
    def step(state, x):
        return jax.tree.map(lambda a: a + x.sum(), state), x.sum()

    def fresh():
        return {"a": jnp.arange(8.0).reshape(4, 2), "n": jnp.ones(3)}, jnp.ones((6, 5))

    devices = dj.engine.LocalDevices(jax.devices()[:2])
    sharded = dj.partition(dj.trace(step, *fresh(), carry={"state": "out[0]"}), 1)
    found = dict(rivals.sharded_jits(step, sharded, devices, is_batch_told=False))
    laid, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args: laid.append(args) or put(*args))
    for name, axes in (
        ("", [None, None]),
        (" by state", [0, None]),
        (" by columns", [1, None]),
    ):
        run = found[f"jit, sharded{name} over 2 devices"]
        state, x = fresh()
        for _ in range(2):
            expected, _ = step(state, x)
            laid.clear()
            state, _ = run(state, x)
            assert cut_axes(state) == axes
            chex.assert_trees_all_close(state, expected)
        assert not laid  # in the last call: all of it is there


def two_branches(x):
    return jnp.tanh(x[:64] @ x[:64]) @ x[:64], jnp.tanh(x[64:, :8] @ x[:8, :8])


@pytest.fixture
def costing(monkeypatch):
    """Lets every kernel take what a function says of it, and a call so much for each task."""

    def fake(seconds_of, task_s=0.0):
        measure, known = planning.measure_calibration, {}

        def measured(sharded, devices, **options):
            found = measure(sharded, devices, **options)
            for kernel, digest in kernel_digests(sharded.kernels).items():
                seconds = (seconds_of(kernel),) * 2
                known[digest] = dataclasses.replace(found.kernels[digest], seconds=seconds)
            calls = found.calls and CallCosts(0.0, task_s, *[0.0] * 6)
            return dataclasses.replace(found, kernels={**found.kernels, **known}, calls=calls)

        monkeypatch.setattr(planning, "measure_calibration", measured)

    return fake


def operand_sizes(kernel):
    return float(np.prod([aval.size for aval in kernel.operands]))


@pytest.mark.parametrize(
    ("seconds_of", "task_s", "is_coarse"),
    [
        (lambda kernel: 1.0, 0.0, True),  # it is dispatch that takes long
        (operand_sizes, 0.0, False),
        (operand_sizes, 1e9, True),  # beyond the makespan
    ],
)
def test_the_cut_is_that_of_the_shortest_call(seconds_of, task_s, is_coarse, costing):
    costing(seconds_of, task_s)
    x = jnp.linspace(-1.0, 1.0, 72 * 64).reshape(72, 64)
    options = {"method": "heft", "budget_s": 99.0, "cache": False}
    lowered = dj.distribute(two_branches, devices=jax.devices()[:2], **options).lower(x)
    assert set(lowered.by_cut) == {1, 2, 4}
    assert (min(lowered.by_cut, key=lowered.by_cut.get) == 1) == is_coarse
    call_s = lowered.placed.makespan_s + task_s * lowered.sharded.graph.num_tasks
    assert call_s == pytest.approx(min(lowered.by_cut.values()), rel=1e-12)
    assert "(best of 3 cuts)" in lowered.said


def test_the_coarsest_cut_is_there_without_time_and_stays(monkeypatch):
    x = jnp.ones((72, 64))
    fast = functools.partial(
        dj.distribute, two_branches, devices=jax.devices()[:2], method="heft", budget_s=99.0
    )
    with monkeypatch.context() as patch:
        patch.setattr(planning, "CALIBRATING", 0.0)
        assert set(fast().lower(x).by_cut) == {1}
    again = fast().lower(x)
    assert set(again.by_cut) == {1}
    assert "calibration and plan are" in again.said


def test_under_transformations_it_is_the_function(planned):
    fast = distributed()
    loss = lambda f: lambda x: f(ARGS[0], x).sum()  # noqa: E731
    found = jax.jit(jax.grad(loss(fast)))(ARGS[1])
    np.testing.assert_allclose(found, jax.grad(loss(fn))(ARGS[1]), rtol=1e-5, atol=1e-6)
    assert not planned


@pytest.mark.parametrize("wanted", RIVALS)
def test_what_runs_already_can_be_transformed(wanted, monkeypatch):
    choosing(monkeypatch, wanted)
    fast = distributed()
    fast(*ARGS)
    loss = lambda f: lambda x: f(ARGS[0], x).sum()  # noqa: E731
    stacked = jnp.stack([ARGS[1], 2 * ARGS[1]])
    for transform, x in (
        (lambda f: jax.jit(jax.grad(f)), ARGS[1]),
        (jax.grad, ARGS[1]),
        (jax.vmap, stacked),
        (jax.jit, ARGS[1][:2]),  # of a shape of which nothing is known
    ):
        found, expected = transform(loss(fast))(x), transform(loss(fn))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_one_device_effects_and_pins_are_not_compared(planned, capsys):
    alone = dj.distribute(fn, devices=jax.devices()[:1])
    np.testing.assert_allclose(alone(*ARGS), fn(*ARGS), rtol=1e-5, atol=1e-6)
    assert "nothing to distribute" in capsys.readouterr().err

    @dj.distribute(devices=jax.devices()[:2])
    def printing(x):
        jax.debug.print("seen")
        return 2 * x

    np.testing.assert_array_equal(printing(ARGS[1]), 2 * ARGS[1])
    jax.effects_barrier()
    printed = capsys.readouterr()
    assert printed.out.count("seen") == 1
    assert "it has effects" in printed.err
    assert not planned
    pinned = distributed(pin={"*": 1})
    pinned(*ARGS)
    assert set(pinned.plan.placement.tolist()) == {1}
    assert "held to its pins" in capsys.readouterr().err
    alone = dj.distribute(fn, devices=jax.devices()[:1], pin={"*": 0})
    alone(*ARGS)
    assert "jit runs it, whatever its pins" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": 0.0}, "budget_s is 0.0; expected more than 0"),
        ({"devices": []}, "devices is empty"),
        ({"devices": ["remote"]}, r"devices\[0\] is 'remote'; expected a JAX device"),
        ({"mode": "lazy"}, "unknown mode 'lazy'"),
        ({"method": "guess"}, "unknown method 'guess'"),
    ],
)
def test_bad_options_are_refused_before_a_call(options, message):
    with pytest.raises(ValueError, match=message):
        dj.distribute(fn, **options)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({"num_shards": 3}, ARGS, "num_shards is 3; expected a power of two"),
        ({"resident": ("weights",)}, ARGS, "weights"),
        ({"pin": {"atn*": 0}}, ARGS, r"pin names 'atn\*', which fits no task"),
        ({"pin": {"*": 2}}, ARGS, r"pin\['\*'\] is 2; expected devices from 0 to 1"),
        ({"together": ["atn*"]}, ARGS, r"together names 'atn\*', which fits no task"),
        (
            {},
            ({**ARGS[0], "act": jnp.tanh}, ARGS[1]),
            r"args\[0\]\['act'\] is .*split the tree",
        ),
        ({}, (*ARGS, "fast"), r"args\[2\] is str 'fast'.*functools.partial"),
        # What is placed is also run.
        ({}, (ARGS[0], jax.eval_shape(jnp.array, ARGS[1])), r"args\[1\] is Shape.* an array"),
    ],
)
def test_bad_calls_are_refused_before_anything_is_measured(options, args, message, monkeypatch):
    forbidden = lambda *_, **__: pytest.fail("measured")  # noqa: E731
    monkeypatch.setattr(planning, "measure_calibration", forbidden)
    with pytest.raises(ValueError, match=message):
        distributed(**options)(*args)


def test_a_keyword_that_is_an_option_of_trace_is_refused():
    fast = dj.distribute(lambda x, resident: x * resident, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"\['resident'\] by keyword, which are options"):
        fast(ARGS[1], resident=jnp.ones(()))


def test_the_stages_can_be_looked_at_and_a_call_takes_them_over(planned, monkeypatch):
    choosing(monkeypatch, "plan")
    fast = distributed(resident=(0,), pin={"*": 1})
    lowered = fast.lower(ARGS[0], jax.eval_shape(jnp.array, ARGS[1]))
    assert tuple(lowered.sharded.names) == lowered.placed.names
    assert lowered.costs.num_devices == 2
    assert np.isinf(lowered.costs.compute_s[:, 0]).all()
    assert set(lowered.placed.placement.tolist()) == {1}
    assert set(lowered.sharded.graph.input_home) == {dj.graphs.RESIDENT, 0}
    for args in (ARGS, (ARGS[0], 2 * ARGS[1])):
        np.testing.assert_allclose(fast(*args), fn(*args), rtol=1e-5, atol=1e-6)
    assert len(planned) == 1


def test_placing_gets_its_share_or_what_calibration_leaves(planned):
    distributed(budget_s=1e-3).lower(*ARGS)
    distributed(budget_s=1000.0, cache=False).lower(*ARGS)
    assert planned[0] == planning.LEAST_PLACING_S
    most_s = 1000 * distribute.PLANNING * planning.PLACING
    assert most_s - 1 < planned[1] <= most_s


def test_a_function_without_work_gets_a_plan_too(monkeypatch):
    choosing(monkeypatch, "plan")
    fast = dj.distribute(lambda x: (x, {"same": x}), devices=jax.devices()[:2])
    first, second = fast(ARGS[1])
    np.testing.assert_array_equal(first, ARGS[1])
    np.testing.assert_array_equal(second["same"], ARGS[1])


def test_pins_hold_by_name_and_keywords_are_arguments():
    def fn(x, w):
        with jax.named_scope("first"):
            y = jnp.tanh(x @ w)
        with jax.named_scope("last"):
            return y @ w

    x, options = jnp.ones((8, 8)), {"method": "heft", "num_shards": 1}
    fast = dj.distribute(fn, devices=jax.devices()[:2], pin={"first": 1, "last": 0}, **options)
    np.testing.assert_allclose(fast(x, w=x), fn(x, x), rtol=1e-6)
    names = fast.lower(x, w=x).sharded.names
    assert fast.plan.placement.tolist() == [int(name.startswith("first")) for name in names]


OTHER = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import doppler_jax as dj
from doppler_jax.engine import planning

four = dj.make_cluster("reference_x4")
planning.measure_host = lambda devices: jax.tree.map(lambda a: a[(slice(2),) * a.ndim], four)
fast = dj.distribute(lambda x: jnp.tanh(x @ x), method="heft", budget_s=9.0)
lowered = fast.lower(jnp.ones((8, 8)))
print(lowered.said.split(", ")[1][:10], lowered.placed.placement.tolist())
"""


@pytest.mark.slow
def test_another_process_measures_and_plans_nothing_again(tmp_path, monkeypatch):
    first, second = (run_python("-c", OTHER).stdout for _ in range(2))
    assert first.startswith("calibrated [")
    assert second == first.replace("calibrated", "calibratio")


def test_a_damaged_file_is_as_if_there_were_none(tmp_path):
    distributed().lower(*ARGS)
    (kept,) = (tmp_path / "cache" / "devices").iterdir()
    for path in kept.iterdir():
        path.write_text("{")
    assert "calibrated and placed in" in distributed().lower(*ARGS).said
    assert "calibration and plan are" in distributed().lower(*ARGS).said


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, ""),
        ({"method": "heft"}, "placed"),
        ({"objective": dj.Objective()}, "placed"),
        ({"key": 1}, "placed"),
        ({"budget_s": 6.0}, "placed"),
        ({"num_shards": 1}, "calibrated and placed"),
        ({"num_shards": None}, "calibrated and placed"),
        ({"pin": {"*": 0}}, "placed"),
        ({"method": lambda request: np.zeros(request.graph.num_tasks, int)}, "placed"),
        ({"cache": False}, "calibrated and placed"),
    ],
)
def test_what_decides_a_plan_is_told_apart(options, again):
    assert "calibrated and placed in" in distributed().lower(*ARGS).said
    said = distributed(**options).lower(*ARGS).said
    assert re.search(rf", {again} in", said) if again else "calibration and plan are" in said
