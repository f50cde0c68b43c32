import dataclasses
import signal
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.simple import random_placements
from doppler_jax.budget import CurveRecorder
from doppler_jax.search import anytime
from doppler_jax.search.anytime import run_search
from doppler_jax.search.drawing import RandomSearch
from doppler_jax.search.lns import LNS
from doppler_jax.search.problem import make_search_problem
from doppler_jax.search.walks import Annealing
from tests.generators import random_problem
from tests.search.cases import DEVICES, optimum_s, pinned_problem, seconds
from tests.simulator.cases import small_problem

SEARCHES = {
    "annealing": Annealing(members=2),
    "lns": LNS(members=2),
    "random": RandomSearch(),
}


def run(
    name, graph, costs, *, evaluations=4000, budget_s=None, target_s=None, seed=0,
    objective=None, key=None, starts=None, curve=None, queue="fifo", **options,
):  # fmt: skip
    if starts is None:
        starts = random_placements(costs, np.random.default_rng(7), 3)
    problem = make_search_problem(graph, costs, objective or dj.Objective(), key, queue)
    budget = dj.search.Budget(evaluations=evaluations, seconds=budget_s, target_s=target_s)
    curve = curve or CurveRecorder()
    plans = problem.ordered(starts)
    return run_search(SEARCHES[name], problem, plans, seed, budget, curve, **options)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_optimum_of_a_small_problem_is_found(name):
    for seed in range(3):
        graph, costs = pinned_problem(seed, 8)
        curve = CurveRecorder()
        found = run(name, graph, costs, curve=curve)
        best = seconds(graph, costs, found.placements)
        assert best[0] == optimum_s(graph, costs)
        assert (np.diff(best) >= 0).all()
        assert len({p.tobytes() for p in found.placements}) == len(best)
        evaluations, _, makespans = zip(*curve.rows, strict=True)
        assert (np.diff(makespans) < 0).all()
        assert (np.diff(evaluations) > 0).all()
        assert makespans[-1] == best[0]


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("bound", [0, 1, 2, 17, 816, 1424])
def test_evaluations_are_within_the_bound_and_nearly_all_are_spent(name, bound):
    graph, costs = pinned_problem(3, 12)
    found = run(name, graph, costs, evaluations=bound)
    assert bound - 2 < found.evaluations <= bound
    assert found.placements.shape[1] == 12
    assert (len(found.placements) > 0) == (bound > 0)
    noisy = {"objective": dj.Objective(num_noise=3), "key": jax.random.key(0)}
    found = run(name, graph, costs, evaluations=bound, **noisy)
    assert bound - 6 < found.evaluations <= bound
    assert found.evaluations % 3 == 0


@pytest.mark.parametrize("name", SEARCHES)
def test_the_seed_decides_and_the_number_of_threads_does_not(name, monkeypatch):
    graph, costs = random_problem(np.random.default_rng(8), 40, DEVICES)
    one = run(name, graph, costs, evaluations=640, seed=1)
    monkeypatch.setattr(anytime, "num_cores", lambda: 1)
    same = run(name, graph, costs, evaluations=640, seed=1)
    np.testing.assert_array_equal(one.placements, same.placements)
    other = run(name, graph, costs, evaluations=640, seed=2)
    assert (
        one.placements.shape != other.placements.shape
        or (one.placements != other.placements).any()
    )


@pytest.mark.parametrize("name", ["annealing", "lns"])
@pytest.mark.parametrize("queue", ["priority", "in_order"])
@pytest.mark.parametrize("links", ["parallel", "serial", "duplex"])
def test_orders_that_are_found_are_worth_what_is_said(name, queue, links, monkeypatch):
    graph, costs = random_problem(np.random.default_rng(8), 40, DEVICES)
    queue, curve = SEARCHES[name].queue or queue, CurveRecorder()
    options = {"evaluations": 60_000, "objective": dj.Objective(links), "queue": queue}
    found = run(name, graph, costs, curve=curve, **options)
    values = [
        seconds(graph, costs, [placement], links=links, queue=queue, priority=rank)[0]
        for placement, rank in zip(found.placements, found.ranks, strict=True)
    ]
    assert values[0] == curve.rows[-1][2]
    assert (np.diff(values) >= 0).all()
    assert values[0] < seconds(graph, costs, found.placements[:1], links=links)[0]
    monkeypatch.setattr(anytime, "num_cores", lambda: 1)
    again = run(name, graph, costs, **options)
    np.testing.assert_array_equal(again.placements, found.placements)
    np.testing.assert_array_equal(again.ranks, found.ranks)


@pytest.mark.parametrize("name", SEARCHES)
def test_interrupting_returns_the_best_so_far(name):
    graph, costs = pinned_problem(5, 14)
    seen = []

    def stop(evaluations):
        seen.append(evaluations)
        if len(seen) == 3:
            raise KeyboardInterrupt

    curve = CurveRecorder()
    found = run(name, graph, costs, on_chunk=stop, curve=curve)
    assert found.interrupted
    assert found.evaluations == seen[-1] < 4000
    assert seconds(graph, costs, found.placements).min() == curve.rows[-1][2]


@pytest.mark.parametrize("name", SEARCHES)
def test_a_bound_on_seconds_ends_it(name, monkeypatch):
    clock = SimpleNamespace(now=0.0)

    def tick():
        clock.now += 1.0
        return clock.now

    monkeypatch.setattr(time, "monotonic", tick)
    graph, costs = pinned_problem(5, 14)
    few, more = (run(name, graph, costs, evaluations=None, budget_s=s) for s in (30.0, 300.0))
    assert 0 < few.evaluations < more.evaluations
    assert not few.interrupted


@pytest.mark.parametrize("name", ["annealing", "lns"])
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_chunk_ends_with_the_seconds_and_with_ctrl_c(name, is_interrupted, monkeypatch):
    monkeypatch.setattr(anytime, "FIRST_STEPS", 10**12)  # years
    graph, costs = pinned_problem(5, 14)
    run(name, graph, costs)  # loads what is compiled
    here, ctrl_c = threading.main_thread().ident, signal.SIGINT if is_interrupted else 0
    timer = threading.Timer(0.3, signal.pthread_kill, (here, ctrl_c))
    timer.start()
    found = run(name, graph, costs, evaluations=None, budget_s=1e6 if is_interrupted else 0.3)
    timer.join()
    assert found.interrupted == is_interrupted
    assert 0 < found.evaluations < 10**9
    assert len(found.placements)


@pytest.mark.parametrize("name", SEARCHES)
def test_it_ends_where_the_target_is_met(name):
    graph, costs = pinned_problem(1, 8)
    target_s = optimum_s(graph, costs)
    found = run(name, graph, costs, evaluations=400_000, target_s=target_s)
    assert seconds(graph, costs, found.placements[:1])[0] == target_s
    assert found.evaluations < 100_000


def test_of_many_starts_the_best_are_taken_and_count():
    graph, costs = pinned_problem(6, 14)
    starts = random_placements(costs, np.random.default_rng(0), 40)
    best = seconds(graph, costs, starts).min()
    curve = CurveRecorder()
    found = run("annealing", graph, costs, evaluations=160, starts=starts, curve=curve)
    assert found.evaluations == 160
    assert curve.rows[0] == (40, curve.rows[0][1], best)
    assert seconds(graph, costs, found.placements[:1])[0] <= best


def test_of_its_starts_it_takes_one_that_fits_whatever_its_makespan():
    graph, costs = random_problem(np.random.default_rng(2), 14, DEVICES)
    starts = random_placements(costs, np.random.default_rng(0), 40)
    schedules = [dj.simulator.simulate_oracle(graph, costs, start) for start in starts]
    peaks = np.array([dj.simulator.peak_memory_bytes(graph, costs, s) for s in schedules])
    slowest = int(np.argmax([s.finish_s.max() for s in schedules]))
    costs = dataclasses.replace(costs, capacity_bytes=peaks[slowest] * 1.001)
    assert (peaks <= costs.capacity_bytes).all(1).sum() == 1
    found = run("annealing", graph, costs, evaluations=80, starts=starts)
    assert len(found.placements)
    assert (
        seconds(graph, costs, found.placements[:1])[0]
        <= seconds(graph, costs, starts[slowest : slowest + 1])[0]
    )


def _plans(graph, costs, placements):
    if placements is not None:
        return make_search_problem(graph, costs, dj.Objective()).ordered(placements)


@pytest.mark.parametrize("name", [name for name in SEARCHES if name != "random"])
def test_starts_that_come_in_late_are_taken_up(name):
    graph, costs = random_problem(np.random.default_rng(8), 40, DEVICES)
    bad = np.zeros((3, 40), np.int64)
    good = run("lns", graph, costs, evaluations=20_000).placements[:1]
    comes = iter([None, bad, good])
    found = run(
        name, graph, costs, evaluations=300, starts=bad,
        late_starts=lambda: _plans(graph, costs, next(comes, None)),
    )  # fmt: skip
    assert found.evaluations <= 300
    assert next(comes, None) is None  # all that came was taken
    best = seconds(graph, costs, good)[0]
    assert seconds(graph, costs, found.placements[:1])[0] <= best
    alone = run(name, graph, costs, evaluations=300, starts=bad)
    assert seconds(graph, costs, alone.placements[:1])[0] > best


@pytest.mark.parametrize("name", [name for name in SEARCHES if name != "random"])
def test_members_learn_what_is_better(name):
    graph, costs = random_problem(np.random.default_rng(8), 40, DEVICES)
    problem, search = make_search_problem(graph, costs, dj.Objective()), SEARCHES[name]
    bad = random_placements(costs, np.random.default_rng(0), 2)
    member = search.begin(problem, bad[0], problem.rank, 0)
    search.run(problem, member, 1, 0.0, 0.0)
    good = run("lns", graph, costs, evaluations=20_000).placements[:1]
    value_s, energy = problem.score(problem.ordered(np.concatenate([good, bad])))
    assert energy[0] < min(energy[1:])
    for told in (0, 2):  # what is worse is not taken
        search.learn(member, [*good, *bad][told], problem.rank, energy[told])
        search.run(problem, member, 1, 1.0, 1.0)
        _, values, _ = search.best(problem, member)
        assert values.min() <= value_s[0]
        assert values[1] < energy[1]


def test_a_search_without_a_bound_is_refused():
    with pytest.raises(ValueError, match="needs a bound"):
        run("annealing", *pinned_problem(6, 4), evaluations=None)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("evaluations", [1, 2, 3, 10, 24, 100, 1000, 2**20])
def test_a_small_budget_takes_fewer_members(name, evaluations):
    fitted = type(SEARCHES[name])().fit(evaluations)
    assert 1 <= fitted.members <= evaluations
    assert type(fitted)().fit(2**20) == type(fitted)()  # as it is, where there is enough


@pytest.mark.parametrize("queue", ["fifo", "in_order"])
@pytest.mark.parametrize("name", SEARCHES)
def test_limits_that_come_in_sight_during_a_search_are_minded(name, queue):
    # A chain whose tasks read 6 bytes each: fastest on one device, which has 16.
    weights = [(dj.graphs.RESIDENT, 6, [v]) for v in range(3)]
    graph, costs = small_problem([1, 1, 1], [(0, 1, [1]), (1, 1, [2])], 3, weights)
    costs = costs.replace(capacity_bytes=np.full(3, 16.0))
    problem = make_search_problem(graph, costs, dj.Objective(), queue=queue)
    assert problem.memory_share(np.arange(3), problem.rank) <= anytime.ROOMY
    assert problem.memory_share(np.zeros(3, int), problem.rank) > 1
    curve, budget = CurveRecorder(), dj.search.Budget(evaluations=2000)
    plans = problem.ordered(np.arange(3)[None])
    found = run_search(SEARCHES[name], problem, plans, 0, budget, curve)
    assert seconds(graph, costs, found.placements[:1])[0] == 4
    assert {len(set(placement.tolist())) for placement in found.placements} <= {2, 3}
