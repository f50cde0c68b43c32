import dataclasses
import time
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.baselines.simple import random_placements
from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.objective import Objective
from doppler_jax.search import anytime
from doppler_jax.search.annealing import Annealing
from doppler_jax.search.anytime import Exact, run_search
from doppler_jax.search.evolution import Evolution
from doppler_jax.search.local_search import LocalSearch
from doppler_jax.search.memetic import Memetic
from doppler_jax.search.objective import make_search_problem, score_padded
from doppler_jax.search.random_search import RandomSearch
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from tests.generators import random_problem
from tests.search.cases import DEVICES, SIZE, one_size, optimum_s, pinned_problem

SEARCHES = {
    "annealing": Annealing(chains=2, proposals=8),
    "evolution": Evolution(parents=8, children=16),
    "local_search": LocalSearch(searchers=2, proposals=8),
    "memetic": Memetic(
        evolution=Evolution(parents=8, children=16),
        descent=LocalSearch(searchers=2, proposals=8),
        patience=8,
    ),
    "random": RandomSearch(draws=16),
}
OBJECTIVE = Objective()


@pytest.fixture(scope="module", autouse=True)
def simulated():
    """How many placements were simulated, as `count`; and one compilation per search.

    Of them `limited` were not looked at for memory if too long.
    """
    seen = SimpleNamespace(count=0, limited=0)
    score = anytime.score

    def note(limit_s):
        seen.count += 16
        seen.limited += np.isfinite(limit_s).sum()

    def counting(objective, problem, placements, limit_s):
        assert placements.shape[:1] == limit_s.shape == (16,)
        jax.debug.callback(note, limit_s)
        return score(objective, problem, placements, limit_s)

    with pytest.MonkeyPatch.context() as patch:
        one_size(patch)
        patch.setattr(anytime, "score", counting)
        yield seen
    jax.clear_caches()  # what was compiled here counts for this file alone


def run(name, graph, costs, *, evaluations=4000, seconds=None, seed=0, **options):
    starts = random_placements(costs, np.random.default_rng(7), 3)
    problem = make_search_problem(graph, costs, OBJECTIVE, jax.random.key(1))
    options.setdefault("recorder", CurveRecorder())
    return run_search(
        SEARCHES[name],
        OBJECTIVE,
        problem,
        options.pop("starts", starts),
        jax.random.key(seed),
        Budget(evaluations=evaluations, seconds=seconds),
        options.pop("recorder"),
        **options,
    )


def values(graph, costs, placements):
    return np.array([makespan_s(simulate_oracle(graph, costs, p)) for p in placements])


@pytest.mark.parametrize("name", SEARCHES)
def test_the_optimum_of_a_small_problem_is_found(name):
    for seed in range(3):
        graph, costs = pinned_problem(seed, 8)
        recorder = CurveRecorder()
        found = run(name, graph, costs, recorder=recorder)
        best = values(graph, costs, found.placements)
        np.testing.assert_allclose(best[0], optimum_s(graph, costs), rtol=1e-6)
        assert (np.diff(best) >= -1e-6 * best[0]).all()
        assert len({p.tobytes() for p in found.placements}) == len(best)
        evaluations, _, makespans = zip(*recorder.rows, strict=True)
        assert (np.diff(makespans) < 0).all()
        assert (np.diff(evaluations) > 0).all()
        np.testing.assert_allclose(makespans[-1], best[0], rtol=1e-6)


@pytest.mark.parametrize("name", SEARCHES)
def test_evaluations_are_what_was_simulated_and_within_the_bound(name, simulated):
    graph, costs = pinned_problem(3, 12)
    for bound in (816, 1424):
        jax.effects_barrier()
        before = simulated.count
        found = run(name, graph, costs, evaluations=bound)
        jax.effects_barrier()
        assert found.evaluations == simulated.count - before
        assert bound - 16 < found.evaluations <= bound


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("share", [1.0, 1.2])
def test_leaving_out_what_is_too_long_to_be_kept_changes_nothing(
    name, share, simulated, monkeypatch
):
    """Memory is tight: of random placements 1.5 and 23% fit."""
    graph, costs = random_problem(np.random.default_rng(3), 14, DEVICES)
    placements = random_placements(costs, np.random.default_rng(0), 32)
    schedules = (simulate_oracle(graph, costs, p) for p in placements)
    peaks = np.array([peak_memory_bytes(graph, costs, s) for s in schedules])
    tight = share * np.quantile(peaks, 0.5, axis=0)
    costs = dataclasses.replace(costs, capacity_bytes=tight)
    jax.effects_barrier()
    before = simulated.limited
    lazy = run(name, graph, costs, evaluations=1600)
    jax.effects_barrier()
    assert (simulated.limited > before) == (name != "annealing")

    class Thorough(type(SEARCHES[name])):
        def limit_s(self, state):
            del state
            return jnp.full(self.batch, jnp.inf)

    search = SEARCHES[name]
    fields = {f.name: getattr(search, f.name) for f in dataclasses.fields(search)}
    monkeypatch.setitem(SEARCHES, name, Thorough(**fields))
    thorough = run(name, graph, costs, evaluations=1600)
    assert len(lazy.placements)
    np.testing.assert_array_equal(lazy.placements, thorough.placements)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_key_decides_and_the_blocks_do_not(name, monkeypatch):
    graph, costs = pinned_problem(4, 14)
    one = run(name, graph, costs, evaluations=640, seed=1)
    monkeypatch.setattr(anytime, "CHUNK_S", 1e-9)  # every chunk is one step
    same = run(name, graph, costs, evaluations=640, seed=1)
    np.testing.assert_array_equal(one.placements, same.placements)
    other = run(name, graph, costs, evaluations=640, seed=2)
    assert (
        one.placements.shape != other.placements.shape
        or (one.placements != other.placements).any()
    )


@pytest.mark.parametrize("name", SEARCHES)
def test_interrupting_returns_the_best_so_far(name, monkeypatch):
    monkeypatch.setattr(anytime, "CHUNK_S", 1e-9)
    graph, costs = pinned_problem(5, 14)
    seen = []

    def stop(evaluations):
        seen.append(evaluations)
        if len(seen) == 3:
            raise KeyboardInterrupt

    recorder = CurveRecorder()
    found = run(name, graph, costs, on_chunk=stop, recorder=recorder)
    assert found.interrupted
    assert seen == [16, 32, 48]
    assert found.evaluations == 48
    best = values(graph, costs, found.placements).min()
    np.testing.assert_allclose(best, recorder.rows[-1][2], rtol=1e-6)


def test_a_bound_on_seconds_ends_it(monkeypatch):
    clock = SimpleNamespace(now=0.0)

    def tick():
        clock.now += 1.0
        return clock.now

    monkeypatch.setattr(time, "monotonic", tick)
    graph, costs = pinned_problem(5, 14)
    few, more = (
        run("annealing", graph, costs, evaluations=None, seconds=s) for s in (30.0, 300.0)
    )
    assert 0 < few.evaluations < more.evaluations < 300 * 16
    assert not few.interrupted


def exact(graph, costs, *, factor=1.0, problems=None):
    """The oracle, if `factor` is 1; else one that is told to find fault with float32."""

    def problem():
        made = make_search_problem(graph, costs, OBJECTIVE, jax.random.key(1), np.float64)
        if problems is not None:
            problems.append(made)
        return made

    return Exact(
        makespan_s=lambda p: factor * makespan_s(simulate_oracle(graph, costs, p)),
        problem=problem,
    )


BUILDING = [name for name in SEARCHES if name != "random"]
"""Searches that build on what they found."""


@pytest.mark.parametrize("name", BUILDING)
def test_where_float32_is_right_nothing_changes(name):
    graph, costs = pinned_problem(4, 14)
    problems = []
    one = run(name, graph, costs, evaluations=640)
    same = run(
        name, graph, costs, evaluations=640, exact=exact(graph, costs, problems=problems)
    )
    np.testing.assert_array_equal(one.placements, same.placements)
    assert not problems


@pytest.mark.parametrize("name", BUILDING)
def test_where_float32_is_wrong_it_goes_on_in_float64(name, simulated, monkeypatch):
    graph, costs = pinned_problem(4, 14)

    def go(evaluations):
        recorder, problems = CurveRecorder(), []
        jax.effects_barrier()
        before = simulated.count
        found = run(
            name, graph, costs, evaluations=evaluations, recorder=recorder,
            exact=exact(graph, costs, factor=1.5, problems=problems),
        )  # fmt: skip
        jax.effects_barrier()
        assert found.evaluations == simulated.count - before == evaluations
        assert len(problems) == 1
        return found, recorder.rows

    found, rows = go(4000)
    best = values(graph, costs, found.placements)
    np.testing.assert_allclose(best[0], optimum_s(graph, costs), rtol=1e-12)
    assert (np.diff(best) >= 0).all()
    np.testing.assert_allclose(rows[-1][2], best[0], rtol=1e-12)
    assert max(row[2] for row in rows if row[0] >= 1000) > best[0]  # from the oracle's word
    one, _ = go(640)
    monkeypatch.setattr(anytime, "CHUNK_S", 1e-9)
    same, _ = go(640)
    np.testing.assert_array_equal(one.placements, same.placements)


def test_where_float32_is_wrong_in_the_end_what_a_check_held_for_shorter_is_handed_on():
    graph, costs = pinned_problem(5, 14)
    judged = []

    def late(placement):
        makespan = makespan_s(simulate_oracle(graph, costs, placement))
        judged.append((makespan * (2 if len(judged) == 7 else 1), placement.copy()))
        return judged[-1][0]

    options = {
        "evaluations": 640,
        "exact": dataclasses.replace(exact(graph, costs), makespan_s=late),
    }
    plain = run("annealing", graph, costs, evaluations=640).placements
    found = run("annealing", graph, costs, **options).placements
    assert len(judged) == 8  # at seven checks, and in the end
    np.testing.assert_array_equal(found[:-1], plain)
    np.testing.assert_array_equal(found[-1], min(judged, key=lambda j: j[0])[1])


def test_where_seconds_count_float64_does_not_begin_late(monkeypatch):
    graph, costs = pinned_problem(5, 14)
    for left_s, count in ((1e6, 0), (0.0, 1)):
        monkeypatch.setattr(anytime, "FLOAT64_S", left_s)
        problems = []
        wrong = exact(graph, costs, factor=1.5, problems=problems)
        run("annealing", graph, costs, evaluations=640, seconds=1e5, exact=wrong)
        assert len(problems) == count


def test_where_seconds_count_checks_are_left_out_that_take_long(monkeypatch):
    clock = SimpleNamespace(now=0.0, check_s=0.0)

    def tick():
        clock.now += 0.05
        return clock.now

    monkeypatch.setattr(time, "monotonic", tick)
    monkeypatch.setattr(anytime, "CHUNK_S", 1e-9)
    graph, costs = pinned_problem(5, 14)
    checked = []

    def slow(placement):
        clock.now += clock.check_s
        checked.append(clock.now)
        return 0.0

    oracle = dataclasses.replace(exact(graph, costs), makespan_s=slow)
    for check_s, count in ((0.0, 7), (1.0, 1)):
        clock.now, clock.check_s = 0.0, check_s
        checked.clear()
        run("local_search", graph, costs, evaluations=None, seconds=40.0, exact=oracle)
        assert len(checked) == count + 1  # and once in the end
    assert 40 / 8 + 1 <= checked[0] < 2 * 40 / 8


def test_interrupting_the_change_to_float64_returns_what_float32_found():
    graph, costs = pinned_problem(4, 14)
    seen = []

    def stop(evaluations):
        seen.append(evaluations)
        if evaluations == 160:
            raise KeyboardInterrupt

    options = {"evaluations": 640, "on_chunk": stop}
    problems = []
    wrong = exact(graph, costs, factor=1.5, problems=problems)
    found = run("local_search", graph, costs, exact=wrong, **options)
    assert len(problems) == 1
    seen.clear()
    plain = run("local_search", graph, costs, **options)
    assert seen[-1] == 160  # a quarter: the second check has been, and no block after it
    assert found.interrupted
    np.testing.assert_array_equal(found.placements, plain.placements)


def test_it_can_choose_among_its_starts():
    graph, costs = pinned_problem(6, 14)
    starts = random_placements(costs, np.random.default_rng(0), 40)
    best = values(graph, costs, starts).min()
    recorder = CurveRecorder()
    found = run(
        "local_search", graph, costs, evaluations=160, starts=starts, choose=True,
        recorder=recorder,
    )  # fmt: skip
    assert found.evaluations == 160
    scored = [row[2] for row in recorder.rows if row[0] <= 48]
    np.testing.assert_allclose(min(scored), best, rtol=1e-6)
    assert values(graph, costs, found.placements[:1])[0] <= best


def test_of_its_starts_it_takes_one_that_fits_whatever_its_makespan(monkeypatch):
    graph, costs = random_problem(np.random.default_rng(2), 14, DEVICES)
    starts = random_placements(costs, np.random.default_rng(0), 40)
    schedules = [simulate_oracle(graph, costs, start) for start in starts]
    peaks = np.array([peak_memory_bytes(graph, costs, s) for s in schedules])
    slowest = int(np.argmax([s.finish_s.max() for s in schedules]))
    costs = dataclasses.replace(costs, capacity_bytes=peaks[slowest] * 1.001)
    fits = (peaks <= costs.capacity_bytes).all(1)
    problem = make_search_problem(graph, costs, OBJECTIVE, jax.random.key(1))
    padded = np.pad(starts, ((0, 0), (0, SIZE - graph.num_tasks)))
    energy = score_padded(OBJECTIVE, problem, padded, len(padded)).energy
    assert fits.sum() == 1
    assert (energy < energy[slowest]).sum() >= SEARCHES["local_search"].members
    begun = []
    begin = LocalSearch.init
    monkeypatch.setattr(
        LocalSearch, "init", lambda self, at: begun.append(np.asarray(at)) or begin(self, at)
    )
    run("local_search", graph, costs, evaluations=128, starts=starts, choose=True)
    np.testing.assert_array_equal(begun[0][0], padded[slowest])
    np.testing.assert_array_equal(begun[0][1], padded[energy.argmin()])


def test_too_small_a_budget_spends_nothing_and_none_is_refused():
    graph, costs = pinned_problem(6, 4)
    found = run("annealing", graph, costs, evaluations=0)
    assert found.evaluations == 0
    assert found.placements.shape == (0, 4)
    with pytest.raises(ValueError, match="needs a bound"):
        run("annealing", graph, costs, evaluations=None)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("evaluations", [1, 2, 3, 10, 24, 100, 1000, 2**20])
def test_a_small_budget_makes_small_batches(name, evaluations):
    fitted = type(SEARCHES[name])().fit(evaluations)
    assert fitted.batch <= max(evaluations, 2)
    assert fitted.members >= 1
    assert type(fitted)().fit(2**20) == type(fitted)()  # as it is, where there is enough


def test_memetic_descends_from_the_best_of_evolution_once_that_stalls():
    graph, costs = pinned_problem(5, 14)
    problem = make_search_problem(graph, costs, OBJECTIVE, jax.random.key(1))
    search = SEARCHES["memetic"]
    starts = random_placements(costs, np.random.default_rng(7), search.members)
    padded = np.pad(starts, ((0, 0), (0, SIZE - graph.num_tasks)))
    state = search.init(jnp.asarray(padded, jnp.int32))
    ask, tell = jax.jit(search.ask), jax.jit(search.tell)
    stalled, least_s = 0, np.inf
    for k in range(400):
        ask_key, tell_key = jax.random.split(jax.random.fold_in(jax.random.key(2), k))
        before = state
        asked = ask(ask_key, problem, before)
        if stalled == search.patience:
            break
        scores = score_padded(OBJECTIVE, problem, np.asarray(asked), search.batch)
        state = tell(tell_key, problem, before, asked, scores, np.float32(0.5))
        stalled = 0 if scores.energy.min() < least_s else stalled + 1
        least_s = min(least_s, scores.energy.min())
        assert state.stalled == stalled
        assert np.isinf(state.descent.best.value_s).all()
    first, second = before.population.best.placement[:2]
    np.testing.assert_array_equal(asked.reshape(2, 8, -1)[:, 0], [first, second])
    scores = score_padded(OBJECTIVE, problem, np.asarray(asked), search.batch)
    state = tell(tell_key, problem, before, asked, scores, np.float32(0.5))
    assert np.isfinite(state.descent.best.value_s).all()
    chex.assert_trees_all_equal(state.population, before.population)
    assert len(state.best.value_s) == 8 + 2


def test_memetic_is_evolution_where_it_cannot_stall():
    search = Memetic()
    longest = search.patience * search.batch
    assert search.fit(longest) == Evolution().fit(longest)
    assert search.fit(longest + search.batch) == search
    assert search.evolution.batch == search.descent.batch
