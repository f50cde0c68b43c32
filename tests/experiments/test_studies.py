"""Every study once, end to end on tiny settings, and the figures that are theirs alone."""

import dataclasses
import importlib
from functools import partial

import chex
import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.calibration import Calibration, KernelTime
from doppler_jax.graphs.pipelines import SCHEDULES
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.system_rl import SystemConfig
from experiments import (
    STUDIES,
    clock,
    distribute,
    fidelity,
    grid,
    orders,
    pipelines,
    scaling,
    search,
    stage3_study,
    transfer,
    transports,
)
from experiments.catalogue import Problem, layered_problem, load_problem
from experiments.functions import FUNCTIONS
from experiments.tables import growth
from tests.commands import printed, save_tiny_checkpoint

DEVICES = 4  # of tests/conftest.py

SMALL = "chainmm/small:p100x4:uniform2"

TINY_SIM = SimConfig(batch=4, minibatches=1, num_elites=2, num_chains=0)

TINY = {
    "search": {"problems": ("tiny-1",), "method": ("random", "annealing"), "links": ("serial",),
               "evaluations": (64,), "seconds": (), "seeds": 2},
    "gaps": {"problems": ("tiny-0", "tiny-1", "dnn/bert24_inference"),
             "method": ("heft", "critical_path"), "exact_s": 5.0},
    "partitions": {"workloads": ("chainmm",), "presets": ("small",), "clusters": ("p100x4",)},
    "table": {"problems": (SMALL,), "method": ("heft", "critical_path"), "seconds": (),
              "seeds": 1, "measured": ()},
    "bench": {"problems": ("tiny-1",), "batches": (3,), "rounds": 2},
    "clock": {"problems": ("tree-9~10",), "method": ("heft",), "seconds": (1.0,),
              "more_method": (), "seeds": 1},
    "plans": {"problems": ("tree-9~10",), "seconds": 1.0, "seeds": 1, "wrong": ("tree-9~10",),
              "wrong_seconds": 0.5, "draws": 3},
    "pipelines": {"sizes": ((2, 3),), "seconds": 0.3},
    "transfer": {"source": ("chainmm/small",), "target": ("ffnn/small",), "shots": (0, 4),
                 "full": 4, "seeds": 1, "training": TINY_SIM, "islands": ("chainmm/small",),
                 "policy": PolicyConfig(width=4, rounds=1, features="coparent")},
    "zero_shot": {"published": (), "instances": 1, "clusters": 2,
                  "evaluations": (64,), "seconds": (), "reference_evaluations": 128},
    "ablation": {"problems": ("tiny-1",), "variants": ("PLC learned alone", "without stage 2"),
                 "method": ("gdp",), "evaluations": (300,), "seconds": (), "seeds": 1},
    "scaling": {"method": ("gdp",), "sizes": (8, 12), "num_devices": 2, "batch": (2,),
                "rounds": 1},
    "distribute": {"functions": ("tiny MLP",), "backends": ("local",), "preset": "small",
                   "budget_s": 1.0, "turn_s": 1e-3, "rounds": 2, "more_s": 1e-3},
    "fidelity": {"workloads": ("moe_block",), "preset": "small", "backend": "local",
                 "plans": 4, "rounds": 2},
    "orders": {"workloads": (orders.BLOCKS, "chainmm"), "preset": "small", "backend": "local",
               "seconds": 0.5, "pairs": 6},
    "engine": {"backends": ("local",), "workloads": ("chainmm",), "preset": "small",
               "idle": ("chainmm",), "tasks": 10, "placements": 1, "steps": 20, "plans": 2,
               "rounds": 1},
    "transports": {"ways": ("rings", "ray compiled graph", "line", transports.WHOLE),
                   "num_bytes": (1 << 8,), "rounds": 10, "workload": "chainmm",
                   "preset": "small", "turns": 1},
    "stage3_study": {"workloads": ("chainmm",), "preset": "small", "evaluations": 300,
                     "updates": 1, "pairs": 9,
                     "training": SystemConfig(batch=2, proposal_evaluations=64)},
}  # fmt: skip
"""Settings by study; one that is not here runs as `--quick` does."""

FAST = {"search", "gaps", "stg", "partitions", "table", "bench", "clock", "plans", "pipelines"}
"""Those that train and measure nothing."""


def load(name):
    return importlib.import_module(f"experiments.{name}").STUDY


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in FAST else pytest.mark.slow)
        for n in STUDIES
        if n != "gpu"  # of other commands, see test_gpu.py
    ],
)
def test_a_study_computes_once_and_says_what_it_found(
    name, tmp_path, monkeypatch, capsys, reference_graphs
):
    study = load(name)
    assert study.name == name
    once = partial(dj.engine.measure_calibration, repeats=1)  # whatever it finds
    monkeypatch.setattr(dj.engine, "measure_calibration", once)
    settings = TINY.get(name, dict(study.quick))
    if name == "zero_shot":
        save_tiny_checkpoint(tmp_path / "policy")
        settings["policy"] = tmp_path / "policy"
    here = {"runs": tmp_path, "host_devices": DEVICES, "shared": reference_graphs.parent}
    settings = dataclasses.replace(study.settings, **settings, **here)
    study.run(settings)
    folder = tmp_path / name
    page = (folder / f"{name}.md").read_text()
    assert capsys.readouterr().out == page + "\n"
    title, _, provenance, *rest = page.splitlines()
    assert title == f"# {name}: {STUDIES[name]}"
    assert provenance.startswith("`python -m experiments.")
    assert provenance.count("; ") == 3
    assert "Not run" not in page
    assert any(line.startswith("| ---") for line in rest)
    for line in rest:
        if line.startswith("!["):
            picture = folder / line.split("(")[1].rstrip(")")
            assert picture.read_bytes().startswith(b"\x89PNG")

    def keep(self, key, result):
        assert "refused" in result, "computed again"

    monkeypatch.setattr(grid.Records, "keep", keep)
    study.run(settings)
    assert (folder / f"{name}.md").read_text() == page


def test_the_studies_are_listed():
    lines = printed("-m", "experiments").splitlines()[2:]
    assert [line.split(maxsplit=1) for line in lines] == [list(i) for i in STUDIES.items()]


def test_every_module_with_a_study_is_listed():
    folder = grid.PAGES.parents[1] / "experiments"
    declared = {p.stem for p in folder.glob("*.py") if "\nSTUDY" in p.read_text()}
    assert declared == set(STUDIES)


def run_of(method, seed, makespan_s, **more):
    where = {"problem": "p", "links": "parallel", "budget": "10 evaluations", "method": method}
    return {**where, "seed": seed, "makespan_s": makespan_s, **more}


def test_search_counts_rows_and_paired_runs():
    records = [run_of("doppler+search", s, v) for s, v in enumerate((1.0, 2.0, 3.0))]
    records += [run_of("annealing", s, v) for s, v in enumerate((2.0, 2.0))]
    records += [run_of("lns", 0, 1.0)]
    first, second = search.against(records)
    assert (first["rival"], first["rows"], first["runs"]) == (
        "annealing",
        "1 / 0 / 0",
        "1 / 1 / 0",
    )
    assert first["mean (%)"] == pytest.approx(-25.0)
    assert (second["rival"], second["rows"]) == ("lns", "0 / 1 / 0")
    assert search.against(records[:3]) == []


def test_curves_hold_the_best_so_far():
    curve = [[50, 200, 2000], [0.1, 0.2, 0.3], [5.0, 4.0, 3.0]]
    found = search._best_by(curve, np.array([50, 199, 200, 1999, 10_000]))
    assert found.tolist() == [5.0, 5.0, 4.0, 4.0, 3.0]


def test_search_gives_the_makespans_that_it_always_gave(tmp_path, reference_graphs):
    study = load("search")
    settings = dataclasses.replace(
        study.settings, problems=("chain_mm_112nodes",), links=("parallel",), seconds=(),
        evaluations=(10_000,), method=("annealing", "lns"), seeds=2, runs=tmp_path,
        host_devices=DEVICES, shared=reference_graphs.parent,
    )  # fmt: skip
    study.run(settings)
    with grid.Records(tmp_path / "search" / "records.jsonl") as book:
        found = [
            book.find(cell.key) for cell in study.cells(grid.Context(settings, tmp_path, None))
        ]
    makespans = {(r["method"], r["seed"]): r["makespan_s"] for r in found if "evaluations" in r}
    expected = {("annealing", 0): 1200.1, ("annealing", 1): 1200.1}
    expected |= {("lns", 0): 1200.08, ("lns", 1): 1200.08}
    assert makespans == pytest.approx(expected, rel=1e-12)


def test_schedules_of_pipelines_that_have_no_room_are_left_out():
    case = {"size": (4, 8), "backward": "halves", "room": "P - i", "transfer": 0.0}
    row = pipelines.row(case, [{"refused": "no room"}])
    assert [row[name] for name in (*SCHEDULES, "fifo", "found")] == [
        None,
        "30",
        None,
        None,
        None,
    ]
    roomy = pipelines.row(case | {"room": "none"}, [])
    assert [roomy[name] for name in SCHEDULES] == ["30", "30", "27"]


def clock_run(problem, method, makespan_s, **more):
    found = {"run": "warm", "problem": problem, "seconds": 5.0, "method": method, "exit": 0}
    found |= {"past_s": 0.25, "makespan_s": makespan_s, "lower_bound_s": 1.0}
    return found | more


def test_the_clock_compares_with_the_best_known_and_counts_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(clock, "BEST", tmp_path / "best.json")
    records = [clock_run("p", "a", 2.0), clock_run("q", "a", 9.0, past_s=0.75)]
    records += [clock_run("p", "b", 1.0, seconds=2.0), clock_run("q", "b", 4.5)]
    killed = {"run": "warm", "problem": "p", "seconds": 5.0, "method": "b", "exit": None}
    records += [killed | {"past_s": 120.0}]
    assert clock.best_known_s(records, "fifo") == {"p": 1.0, "q": 4.5}
    records += [clock_run("q", clock.DEFAULT_METHOD, 5.0, seconds=9.0)]
    of_default, longer, shorter, first = clock._rows(
        records, clock.best_known_s(records, "fifo")
    )
    assert of_default["method"] == clock.DEFAULT_METHOD
    assert (first["method"], first["geometric mean"], first["exit statuses"]) == (
        "a", "2.0000", "0: 2",
    )  # fmt: skip
    assert first["past the bound (s)"] == "0.75"
    # Within 5 s nobody else placed p.
    assert first["worst over the best method"] == "2.0000 q"
    assert (shorter["bound (s)"], shorter["geometric mean"]) == ("5", "1.0000")
    assert shorter["exit statuses"] == "0: 1, None: 1"
    assert longer["bound (s)"] == "2"
    clock.BEST.write_text('{"fifo": {"p": 0.5, "q": 4.0, "r": 3.0}, "in_order": {"q": 3.0}}')
    # What is kept counts where it is less, but nothing is below the lower bound.
    assert clock.best_known_s(records, "fifo") == {"p": 1.0, "q": 4.0, "r": 3.0}
    # A plan of `exact` is one under `in_order` alone.
    records += [clock_run("q", "exact", 2.0)]
    assert clock.best_known_s(records, "fifo")["q"] == 4.0
    assert clock.best_known_s(records, "in_order") == {"p": 1.0, "q": 2.0}


def test_published_graphs_that_are_absent_are_left_out_of_the_clock(tmp_path):
    settings = dataclasses.replace(load("clock").settings, shared=tmp_path, reference_s=600.0)
    cells = load("clock").cells(grid.Context(settings, tmp_path, None))
    problems = {cell.key["problem"] for cell in cells}
    assert problems == {*clock.FAMILIES, *clock.SMALL}
    assert len(problems) == 20
    runs = [cell.key["run"] for cell in cells]
    methods = len(dj.list_methods())
    assert runs.count("long") == 20
    with_policies = {"doppler", "doppler+search", "gdp", "giph", "joint", "placeto"}
    assert {cell.key["method"] for cell in cells if cell.key["run"] == "first"} == with_policies
    assert runs.count("first") == 20 * len(with_policies)
    assert runs.count("warm") == 20 * 3 * (methods + 2 * len(settings.more_method))


def test_graphs_of_the_clock_have_the_sizes_they_should():
    tasks = [load_problem(name).graph.num_tasks for name in clock.SMALL]
    assert min(tasks) >= 10
    assert max(tasks) <= 30
    problem = load_problem(clock.FAMILIES[0])
    costs = dj.make_costs(problem.graph, problem.cluster)
    np.testing.assert_array_equal(costs.seconds_per_byte, problem.costs.seconds_per_byte)


def test_agreement_of_a_simulator_that_is_right_up_to_a_factor():
    measured_s = np.array([1.0, 2.0, 4.0, 8.0])
    found = fidelity.agree(1.5 * measured_s, measured_s)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["error"] == found["bias"] == pytest.approx(0.5)
    assert (found["pairs"], found["in order"]) == (6, 1.0)


def test_agreement_counts_wrong_pairs_among_those_that_can_be_told_apart():
    measured_s = np.array([1.00, 1.04, 1.20, 1.50])
    simulated_s = np.array([1.04, 1.00, 1.50, 1.20])
    found = fidelity.agree(simulated_s, measured_s)
    # (1.00, 1.04) differ by less than 5 %; (1.20, 1.50) are swapped.
    assert (found["pairs"], found["in order"]) == (5, pytest.approx(4 / 5))
    assert found["spearman"] == pytest.approx(0.6)
    assert found["error"] == pytest.approx((0.04 + 0.04 / 1.04 + 0.25 + 0.2) / 4)
    assert fidelity.agree(simulated_s[:2], measured_s[:2])["in order"] is None


def test_what_placements_took_is_told_apart_from_how_fast_the_machine_was():
    worth_s = np.array([1.0, 1.1, 1.2, 1.3, 1.4])
    speed = np.array([[1.0], [1.7], [0.8], [1.2]])
    noise = np.ones((4, 5))
    noise[0, 1] = 3.0  # one run of one placement was disturbed
    found = fidelity.steady_medians(worth_s * speed * noise)
    # The rounds' medians are 1.3 (the outlier shifts it), 2.04, 0.96 and 1.44.
    np.testing.assert_allclose(found, worth_s / 1.2 * (1.3 + 1.44) / 2, rtol=1e-12)


def test_what_transfers_take_of_a_device_is_slower_as_its_kernels_are():
    then = Calibration(
        "ray", ("a", "b"), np.full(2, np.inf), np.zeros(2),
        {"x": KernelTime("x", (1.0, 2.0), 0.0), "y": KernelTime("y", (3.0, 4.0), 0.0)},
        {(0, 1, 8): 1.0, (1, 0, 8): 1.0}, 0.0, {(0, 1, 8): 1.0, (1, 0, 8): 10.0},
    )  # fmt: skip

    def kernels(factors):
        seconds = {k: tuple(np.multiply(factors, t.seconds)) for k, t in then.kernels.items()}
        return {k: KernelTime(k, s, 0.0) for k, s in seconds.items()}

    now = fidelity.steady(then, list(map(kernels, ([1.0, 2.0], [1.5, 3.0], [9.0, 9.0]))))
    assert now.kernels["y"].seconds == (4.5, 12.0)
    assert now.handling == {(0, 1, 8): 1.5, (1, 0, 8): 30.0}
    assert now.transfers == then.transfers


def test_plans_are_spread_and_half_of_them_are_of_one_placement():
    problem = Problem("layers", *layered_problem(32, 2))
    plans = fidelity.choose_plans(problem, 12)
    assert len(plans) == 12
    call_s = fidelity.simulated_s(problem, problem.costs, plans)
    assert 1.5 < call_s.max() / call_s.min() < 3.0
    gaps_s = np.diff(call_s[:6]), np.diff(call_s[6:])
    assert all(gap.min() > 0 and gap.max() < 3 * gap.mean() for gap in gaps_s)
    assert len({tuple(plan.placement) for plan in plans[:6]}) == 6
    assert len({tuple(plan.placement) for plan in plans[6:]}) == 1
    again = fidelity.choose_plans(problem, 12)
    assert [plan.priority.tolist() for plan in again] == [p.priority.tolist() for p in plans]


def test_even_positions_ascend_and_are_taken_once():
    seconds = np.array([1.0, 1.1, 1.2, 1.5, 1.5, 2.0, 9.0])
    assert fidelity.evenly(seconds, 3) == [0, 3, 5]
    assert fidelity.evenly(seconds, 7) == list(range(7))


def test_blocks_fit_group_by_group_and_an_order_is_worth_a_third_there():
    side = 64
    fn, arguments = orders.grouped_blocks(2 * side, side)
    blocks = dj.workloads.Workload("blocks", {}, fn, arguments)
    sharded = dj.partition(dj.trace(fn, *blocks.args), num_shards=1)
    graph, size = sharded.graph, 8 * side**2
    is_block = graph.tensor_bytes == size
    assert is_block.sum() == orders.GROUPS * orders.GROUP
    costs = dj.Costs(
        compute_s=np.repeat(np.where(is_block, 2.0, 0.5)[:, None], 2, 1),
        tensor_bytes=graph.tensor_bytes, input_bytes=graph.input_bytes,
        latency_s=np.zeros((2, 2)), seconds_per_byte=0.1 / size * (1 - np.eye(2)),
        capacity_bytes=np.full(2, orders.ROOM * size + graph.input_bytes.sum()),
    )  # fmt: skip
    problem = Problem("blocks", graph, costs, sharded=sharded)
    placed = [orders.place(problem, queue, 1.0) for queue in ("in_order", "fifo")]
    assert placed[0].makespan_s < 0.67 * placed[1].makespan_s
    slow = dataclasses.replace(costs, seconds_per_byte=1e3 * costs.seconds_per_byte)
    assert orders.place(dataclasses.replace(problem, costs=slow), "fifo", 1.0) is None


def test_an_order_is_held_against_what_was_asked():
    record = {"workload": "w", "tasks": 3, "simulated_s": {"in_order": 0.9, "fifo": 1.0},
              "in_order_s": [0.95] * 3, "fifo_s": [1.0] * 3, "ratio": 0.95,
              "peaks": {"in_order": 0.5, "fifo": 0.6}}  # fmt: skip
    assert orders.row(record | {"interval": (0.9, 0.99)})["asked"] == "kept"
    assert orders.row(record | {"interval": (0.9, 1.01)})["asked"] == "BROKEN"
    none = record | {"simulated_s": {"in_order": 0.9, "fifo": None}}
    assert orders.simulated_ratio(none) is None


def test_arguments_are_sharded_as_asked():
    args = np.zeros((8, 12)), (np.zeros((12, 3)), np.zeros(5))
    axes = {"rows": [0, 0, None], "columns": [1, 0, None]}
    axes |= {"argument 0": [1, None, None], "argument 1": [None, 0, None]}
    assert tuple(axes) == distribute.SHARDINGS
    for sharding, expected in axes.items():
        arrays = jax.tree.leaves(distribute.shard(args, sharding))
        specs = [tuple(array.sharding.spec) for array in arrays]
        assert [spec.index("x") if "x" in spec else None for spec in specs] == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_returns_the_state_that_it_takes(name):
    made = FUNCTIONS[name]("small")
    outputs = jax.eval_shape(made.fn, *made.args)
    if made.is_step:
        expected = jax.tree.map(jax.typeof, made.args[0])
        chex.assert_trees_all_equal_shapes_and_dtypes(outputs[0], expected)


def test_what_distribute_takes_is_held_against_the_best_jit():
    calls = {"distribute": [0.0101, 0.0103, 0.0102], "jit": [0.02] * 3, "plan": [0.015] * 3}
    calls |= {"plan, fused": [0.012] * 3, "jit, sharded by rows": [0.01] * 3}
    record = {"function": "training step", "chosen": "plan, fused", "devices used": 2,
              "call_s": calls, "simulated_s": 0.009, "first_s": 60.0}  # fmt: skip
    found = distribute.row(record)
    assert (found["distribute / best jit"], found["plan / best jit"]) == ("1.020", "1.200")
    assert (found["by"], found["bound"]) == ("rows", "kept")
    broken = record | {"call_s": calls | {"distribute": [0.0103] * 3}}
    assert distribute.row(broken)["bound"] == "BROKEN"
    kept, plans, *steps, odd = distribute.asked_for([record, broken]).values()
    assert (kept, plans, odd) == ("1 of 2", 2, None)
    assert steps == pytest.approx([0.6, 1.2])  # over jit, and over the best jit
    more = {name: found + found[:1] for name, found in calls.items() if "plan" not in name}
    assert distribute.row(record | {"call_s": calls | more})["plan / best jit"] == "1.200"


def test_traffic_is_told_by_island():
    cluster = dj.make_cluster("v100x8")
    assert transfer.islands(cluster).tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    graph = load_problem(SMALL).graph
    for where, kind in (([0], 0), ([0, 1], 1), ([0, 4], 2)):
        placement = np.resize(where, graph.num_tasks)
        shares = transfer.traffic_shares(graph, cluster, placement)
        assert shares.sum() == pytest.approx(1.0)
        assert shares[kind] > 0
        assert shares[kind + 1 :].sum() == 0
    alone = dj.from_edge_delays([1.0], [], num_devices=8)[0]
    assert transfer.traffic_shares(alone, cluster, np.zeros(1, int)).tolist() == [0, 0, 0]


def test_a_method_ends_where_it_would_take_too_long():
    settings = dataclasses.replace(load("scaling").settings, limit_s=5.0)
    context = grid.Context(settings, None, None)
    refused = scaling.time_method(context, "gdp", 2, 1000, {10: 1e-3, 100: 0.1})  # maybe 10 s
    assert refused == {"refused": "it would take too long"}
    records = [{"tasks": 10, "update_s": 0.01}, {"tasks": 1000, "update_s": 100.0}]
    assert growth(records, "update_s") == pytest.approx(2.0)


STAGE3 = {
    "stage2": [0, 1], "stage3": [1, 0], "stage2_s": 0.02, "stage3_s": 0.015, "ratio": 0.75,
    "interval": [0.7, 0.8], "measured placements": 262,
}  # fmt: skip


def test_stage3_rows_say_what_was_delivered_and_lost():
    row = stage3_study.row({**STAGE3, "interval": None})
    assert (row["stage 3 / stage 2"], row["stage 2 lost"]) == ("0.750", None)
    lost = {"ratio": 3.0, "interval": None, "is_aborted": True}
    left = {"ratio": 0.9, "interval": [0.8, 1.0], "is_aborted": False}
    row = stage3_study.row({**STAGE3, "stage2_lost": lost, "stage3_lost": left})
    assert row["stage 3 / stage 2"] == "0.750 (0.700 to 0.800)"
    assert (row["stage 2 lost"], row["stage 3 lost"]) == (">+200.0%", "-10.0%")
    dropped = {**STAGE3, "stage3": [0, 1], "ratio": 1.15, "interval": [1.1, 1.2]}
    assert stage3_study.row(dropped)["stage 3 / stage 2"].startswith("1.000; dropped 1.150")


def test_false_costs_are_of_transfers_alone():
    graph, costs = load_problem(SMALL).graph, load_problem(SMALL).costs
    costs = dataclasses.replace(
        costs, handling_s=np.ones(4), handling_s_per_byte=np.full(4, 1e-9)
    )
    wrong = stage3_study.falsified(costs, 10.0)
    np.testing.assert_array_equal(wrong.compute_s, costs.compute_s)
    for name in ("latency_s", "seconds_per_byte", "handling_s", "handling_s_per_byte"):
        np.testing.assert_array_equal(getattr(wrong, name), 10.0 * getattr(costs, name))
    dj.costs.check_costs(graph, wrong)
