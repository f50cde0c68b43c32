import dataclasses
import json
from functools import partial
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.build import from_edge_delays
from doppler_jax.problems import Chosen
from doppler_jax.simulator.oracle import makespan_s, simulate_plan
from doppler_jax.training import system_rl
from doppler_jax.training.paired import MeasurementLog, Paired
from doppler_jax.training.stages import plan_record, run_stage3
from doppler_jax.training.system_rl import (
    System,
    SystemConfig,
    begin_system,
    best_plan,
    compare,
    set_incumbent,
    system_update,
)
from tests.policies.cases import CONFIG, params
from tests.training.cases import chains_case, fresh_state

SYSTEM = SystemConfig(
    batch=16, proposals=0, pairs=1, confirm_pairs=6, final_pairs=7, learning_rate=3e-2
)
FEW = dataclasses.replace(SYSTEM, batch=2, proposals=2, proposal_evaluations=512)
POOR = dj.Plan(np.array([0, 1, 0, 1, 2, 0, 2]))  # every tensor has to move


@pytest.fixture
def taught_nothing(monkeypatch):
    """Spares the compilation of the gradient step where the policy does not matter."""
    monkeypatch.setattr(system_rl, "_descend", lambda state, *_, **__: (state, jnp.float32(0)))


def simulated(plan, costs=None):
    graph, true, _ = chains_case()
    return simulate_plan(graph, costs or true, plan)


def exact(candidate, incumbent, rounds, costs=None):
    """Measures without noise, as the simulator has it."""
    runs = [simulated(p, costs) for p in (candidate, incumbent)]
    return Paired(*((makespan_s(run),) * rounds for run in runs), trace=runs[0])


def refuse(*args):
    raise AssertionError("the log must hold every measurement")


def train(folder, measure, num_updates, incumbent=POOR, config=SYSTEM):
    graph, costs, _ = chains_case()
    policy = dj.policies.Policy(params=jax.tree.map(jnp.asarray, params()), config=CONFIG)
    cluster = dj.make_cluster("reference_x4")
    chosen = Chosen(name="chains", cluster=cluster, graph=graph, costs=costs)
    options = {"seed": 0, "num_updates": num_updates, "config": config}
    return run_stage3(chosen, folder, policy, incumbent, measure, **options)


def start(path, measure, config=SYSTEM, refit=None):
    graph, costs, problem = chains_case()
    log, refit = MeasurementLog(path, measure), refit or (lambda traces: costs)
    system = System(graph=graph, refit=refit, policy=CONFIG, config=config, log=log)
    return system, begin_system(fresh_state(problem, config, config.num_elites))


def once(path, measure, config=SYSTEM, refit=None):
    """The system after its first update from `POOR`, and what the update says."""
    system, state = start(path, measure, config, refit)
    return system, *system_update(set_incumbent(state, system, POOR), system)


def plan_of(state):
    return best_plan(state, 7)


@pytest.mark.slow
def test_measured_episodes_improve_on_the_incumbent(tmp_path):
    trained = train(tmp_path / "stage3" / "run", exact, num_updates=36)
    first_s, last_s = (makespan_s(simulated(p)) for p in (POOR, trained.plan))
    assert trained.seconds == last_s < 0.5 * first_s
    log = (trained.folder / "measurements.jsonl").read_text()
    entries = list(map(json.loads, log.splitlines()))
    assert len(entries) <= 2 + 36 * (SYSTEM.batch + 1)
    samples = [e for e in entries if e["rounds"] == SYSTEM.pairs]
    # No plan is an episode twice.
    assert len({json.dumps(e["candidate"]) for e in samples}) == len(samples)
    written = json.loads((trained.folder / "placement.json").read_text())
    ratio = last_s / first_s
    times = {"measured_s": last_s, "first_s": first_s, "ratio": ratio, "interval": [ratio] * 2}
    assert written == {**plan_record(trained.plan), **times}


@pytest.mark.slow
def test_the_policy_itself_learns_from_measured_times(tmp_path):
    system, state = start(tmp_path / "log.jsonl", exact)
    state = set_incumbent(state, system, POOR)
    mean_s = []
    for _ in range(30):
        state, metrics = system_update(state, system)
        mean_s.append(float(metrics["measured_mean_s"]))
    assert np.mean(mean_s[-5:]) < 0.75 * np.mean(mean_s[:5])


@pytest.mark.slow
def test_search_on_refitted_costs_repairs_false_ones(tmp_path, taught_nothing):
    """Tensors cost nothing to move, it was believed; a policy of 2 samples would not tell."""
    costs = chains_case()[1]
    free = dataclasses.replace(costs, seconds_per_byte=np.zeros_like(costs.latency_s))
    best_s = 4 * 1.04
    found = {}
    for name, refit in (("kept", lambda t: free), ("refitted", lambda t: costs if t else free)):
        _, state, _ = once(tmp_path / name, exact, FEW, refit)
        found[name] = makespan_s(simulated(plan_of(state)))
    assert found["refitted"] < best_s
    assert found["kept"] > 1.3 * best_s


def test_searches_take_moving_for_free_until_a_run_moved_something(tmp_path, taught_nothing):
    """All on one device is believed best, as moving is believed dear; but it is free."""
    true = chains_case()[1]
    zero = np.zeros_like(true.latency_s)
    free = dataclasses.replace(true, latency_s=zero, seconds_per_byte=zero)
    dear = dataclasses.replace(true, latency_s=100 * (1 - np.eye(len(zero))))

    def refit(traces):
        return free if any(len(trace.transfer_tensor) for trace in traces) else dear

    system, state = start(tmp_path / "log", partial(exact, costs=free), FEW, refit)
    state = set_incumbent(state, system, dj.Plan(np.zeros(7, int)))
    state, _ = system_update(state, system)
    assert float(state.best_makespan_s) < 5


@pytest.fixture
def searches(monkeypatch):
    """Records the searches for proposals."""
    spied = mock.Mock(wraps=system_rl.run_search)
    monkeypatch.setattr(system_rl, "run_search", spied)
    return spied


def test_searches_start_from_all_that_was_measured(tmp_path, taught_nothing, searches):
    system, state, _ = once(tmp_path / "log", exact, FEW)
    incumbent = plan_of(state)
    system_update(state, system)
    starts = searches.call_args.args[2].placements
    np.testing.assert_array_equal(starts[0], incumbent.placement)
    measured = {tuple(m.candidate.placement.tolist()) for m in system.log.before(1)}
    assert len(measured) > 2
    assert {tuple(placement) for placement in starts.tolist()} >= measured


def propose(ran, starts, known=(), costs=None):
    graph, true, _ = chains_case()
    config = SystemConfig(proposals=4, proposal_evaluations=512, links="parallel")
    traces, key = list(map(simulated, ran)), jax.random.key(0)
    return system_rl.propose(graph, costs or true, traces, starts, known, key, config)


def test_proposals_simulate_better_than_the_incumbent(searches):
    incumbent = POOR
    while found := propose([POOR], [incumbent] * 100):
        incumbent_s = makespan_s(simulated(incumbent))
        assert all(makespan_s(simulated(p)) < incumbent_s for p in found)
        assert len(searches.call_args.args[2].placements) == 64  # an eighth of the evaluations
        incumbent = found[0]
    assert makespan_s(simulated(incumbent)) < makespan_s(simulated(POOR))
    known = set(propose([POOR], [POOR]))
    again = set(propose([POOR], [POOR], known))
    assert again
    assert not again & known


def test_searches_take_handling_for_free_until_runs_tell_what_it_takes(searches):
    """All that was measured moved as much, so nothing says that it is as dear as believed."""
    costs = chains_case()[1]
    num_devices = costs.num_devices
    handling = {"handling_s": np.full(num_devices, 9.0)}
    believed = costs.replace(**handling, handling_s_per_byte=np.zeros(num_devices))

    def handling_s(plans):
        assert propose(plans, plans, costs=believed)
        return np.asarray(searches.call_args.args[1].costs.handling_s)

    alike = [POOR] * 6
    np.testing.assert_array_equal(handling_s(alike), np.zeros(num_devices))
    apart = [[0, 0, 0, 0, 0, d, d] for d in range(2)]
    others = *apart, [0, 1, 0, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0]
    varied = [POOR, *map(dj.Plan, others)]
    counts = [
        {int(((t.transfer_source == d) | (t.transfer_destination == d)).sum())
         for t in map(simulated, varied)}
        for d in range(num_devices)
    ]  # fmt: skip
    known = np.array([len(count) >= 4 for count in counts])
    assert known.any()
    np.testing.assert_array_equal(handling_s(varied), np.where(known, 9.0, 0.0))


def test_one_lucky_measurement_does_not_displace_the_incumbent(tmp_path):
    """All others are slower, but seem faster when they are measured first."""
    seen = set()

    def flattering(candidate, incumbent, rounds):
        is_poor = candidate == POOR
        first = candidate not in seen
        seen.add(candidate)
        return Paired((10.0 if is_poor else 1.0 if first else 11.0,) * rounds, (10.0,) * rounds)

    _, state, _ = once(tmp_path / "log", flattering)
    assert plan_of(state) == POOR
    assert state.best_makespan_s == 10.0
    # Nor is what was not confirmed imitated as if it were better.
    assert state.elites.makespan_s.min() == 10.0


def test_a_gain_within_the_noise_does_not_displace_the_incumbent(tmp_path):
    """A twentieth faster in the median, but slower in three of nine pairs."""

    def unsteady(candidate, incumbent, rounds):
        faster = 1.0 if candidate == POOR else 0.95
        candidate_s = (faster, faster, 1.5) * rounds
        return Paired(candidate_s[:rounds], (1.0,) * rounds)

    config = dataclasses.replace(SYSTEM, confirm_pairs=9)
    _, state, _ = once(tmp_path / "log", unsteady, config)
    assert plan_of(state) == POOR


def test_drift_of_the_machine_changes_nothing(tmp_path):
    """Every pair is slower than the one before, by as much as placements differ."""
    speed = {"now": 1.0}

    def drifting(candidate, incumbent, rounds):
        found = exact(candidate, incumbent, rounds)
        speed["now"] *= 1.2
        slow = np.array([found.candidate_s, found.incumbent_s]) * speed["now"]
        return Paired(*map(tuple, slow.tolist()), trace=found.trace)

    states = []
    for name, measure in (("steady", exact), ("drifting", drifting)):
        system, state, _ = once(tmp_path / name, measure)
        states.append(system_update(state, system)[0])
    assert plan_of(states[0]) == plan_of(states[1])
    # The first measurement sets the unit.
    np.testing.assert_allclose(states[1].best_makespan_s, 1.2 * states[0].best_makespan_s, 1e-5)


def test_a_placement_too_slow_to_repeat_is_worth_what_it_took_at_least(tmp_path):
    def guarded(candidate, incumbent, rounds):
        if candidate == POOR:
            return exact(candidate, incumbent, rounds)
        return Paired((30.0,), (10.0,), is_aborted=True)

    _, state, metrics = once(tmp_path / "log", guarded)
    assert plan_of(state) == POOR
    np.testing.assert_allclose(metrics["measured_mean_s"], 3 * state.best_makespan_s, rtol=1e-6)


def test_a_finished_stage_measures_nothing_again_and_refuses_another_incumbent(tmp_path):
    first = train(tmp_path / "stage3" / "run", exact, num_updates=1)

    again = train(tmp_path / "stage3" / "run", refuse, num_updates=1)
    assert again.seconds == first.seconds
    assert again.plan == first.plan
    train(tmp_path / "stage3" / "run", exact, num_updates=0)
    with pytest.raises(ValueError, match="incumbent was"):
        train(tmp_path / "stage3" / "run", exact, 0, incumbent=dj.Plan(np.zeros(7, int)))


def test_proposals_may_differ_from_the_incumbent_in_order_alone():
    """Device 0 has task 0, which nobody waits for, and task 1, which device 1 does."""
    graph, costs = from_edge_delays([1.0, 1.0, 3.0], [(1, 2, 1.0)], num_devices=2)
    pinned = np.array(costs.compute_s)
    pinned[[0, 1, 2], [1, 1, 0]] = np.inf
    costs = dataclasses.replace(costs, compute_s=pinned)
    poor = dj.Plan(np.array([0, 0, 1]), np.array([0, 1, 2]), "in_order")
    traces = [simulate_plan(graph, costs, poor)]
    given = graph, costs, traces, [poor], (), jax.random.key(0), FEW
    (found,) = system_rl.propose(*given)
    assert (found.placement.tolist(), found.priority.tolist()) == ([0, 0, 1], [1, 0, 2])


def test_the_incumbent_is_the_first_best(tmp_path):
    def measure(candidate, incumbent, rounds):
        assert candidate == incumbent
        return Paired(tuple(np.linspace(4.0, 5.0, rounds)), (4.0,) * rounds)

    config = dataclasses.replace(SYSTEM, confirm_pairs=7)
    system, state = start(tmp_path / "log.jsonl", measure, config)
    state = set_incumbent(state, system, POOR)
    assert state.best_makespan_s == 4.5
    assert state.best_placement.tolist() == [*POOR.placement, 0]


@pytest.mark.parametrize(("last_s", "kept"), [(1.0, 1), (2.0, 0), (3.0, 0)])
def test_the_last_is_kept_only_if_it_is_faster_than_the_first(tmp_path, last_s, kept):
    plans = dj.Plan([0]), dj.Plan([0], [0], "in_order")  # of one placement

    def measure(candidate, incumbent, rounds):
        assert (candidate, incumbent, rounds) == (plans[1], plans[0], SYSTEM.final_pairs)
        return Paired((last_s,) * rounds, (2.0,) * rounds)

    system, _ = start(tmp_path / "log.jsonl", measure)
    found = compare(system, 7, *plans)
    assert found.plan == plans[kept]
    assert (found.seconds, found.first_s) == (min(last_s, 2.0), 2.0)
    assert (found.ratio, found.interval) == (last_s / 2, (last_s / 2, last_s / 2))


def test_a_placement_is_as_fast_as_itself(tmp_path):
    system, _ = start(tmp_path / "log", lambda *a: Paired((0.5,) * 7, (1.0,) * 7))
    found = compare(system, 3, POOR, POOR)
    assert (found.seconds, found.first_s) == (1.0, 1.0)
    assert (found.ratio, found.interval) == (1.0, (1.0, 1.0))


def test_an_update_is_a_function_of_the_state_and_the_log(tmp_path):
    config = dataclasses.replace(FEW, batch=SYSTEM.batch)  # compiled already
    system, state, _ = once(tmp_path / "log", exact, config)
    after, _ = system_update(state, system)
    replayed, _ = start(tmp_path / "log", refuse, config)
    again, _ = system_update(state, replayed)
    chex.assert_trees_all_equal(after.params, again.params)
    assert plan_of(after) == plan_of(again)
    assert plan_of(after).queue == "in_order"
