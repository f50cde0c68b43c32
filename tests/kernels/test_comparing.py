"""What rivals' calls say: which one runs from now on."""

from types import SimpleNamespace

import numpy as np
import pytest

from doppler_jax.engine import comparing


def on_a_clock(monkeypatch):
    """Returns what makes calls of about so many seconds, on a clock of their own."""
    clock, rng = SimpleNamespace(now=0.0), np.random.default_rng(0)
    clocks = dict.fromkeys(("perf_counter", "monotonic"), lambda: clock.now)
    monkeypatch.setattr(comparing, "time", SimpleNamespace(**clocks))

    def taking(seconds):
        def call():
            clock.now += seconds * rng.uniform(0.9, 1.1)

        return call

    return taking


def test_more_calls_find_a_plan_that_is_a_little_faster(monkeypatch):
    taking = on_a_clock(monkeypatch)
    calls = {"plan": taking(0.96), "a": taking(1.0)}

    def times_chosen():
        found = [comparing.compare_calls(calls, np.inf) for _ in range(40)]
        return sum(each.chosen == "plan" for each in found)

    with_more = times_chosen()
    monkeypatch.setattr(comparing, "ROUNDS", (15,))
    assert times_chosen() < 20 < with_more


def test_close_rivals_get_more_calls_and_others_drop_out(monkeypatch):
    taking = on_a_clock(monkeypatch)
    calls = {"plan": taking(2.0), "a": taking(1.02), "b": taking(1.0)}

    def times_chosen():
        found = [comparing.compare_calls(calls, np.inf) for _ in range(40)]
        for each in found:
            rounds = {name: len(times) for name, times in each.call_s.items()}
            assert rounds["plan"] <= comparing.ROUNDS[0]
            assert rounds["a"] == rounds["b"] >= rounds["plan"]
        return sum(each.chosen == "b" for each in found)

    with_more = times_chosen()
    monkeypatch.setattr(comparing, "ROUNDS", comparing.ROUNDS[:1])
    assert times_chosen() < with_more >= 36


def test_equal_rivals_do_not_run_forever(monkeypatch):
    taking = on_a_clock(monkeypatch)
    calls = {"plan": taking(2.0), "a": taking(1.0), "b": lambda: calls["a"]()}
    monkeypatch.setattr(comparing, "ROUNDS", (8, 100, 1_000_000))
    monkeypatch.setattr(comparing, "CLOSE", 1.1)
    found = comparing.compare_calls(calls, np.inf)
    assert [len(times) for times in found.call_s.values()] == [8, 100, 100]


def test_what_is_far_slower_leaves_after_few_calls(monkeypatch):
    taking = on_a_clock(monkeypatch)
    calls = {"plan": taking(1.5), "a": taking(1.0), "b": taking(1.01)}
    found = comparing.compare_calls(calls, np.inf)
    rounds = {name: len(times) for name, times in found.call_s.items()}
    assert rounds["plan"] == 3 < 8 < rounds["a"]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"plan": 1.0, "a": 2.0}, "plan"),
        ({"plan": 2.0, "a": 1.0}, "a"),
        ({"plan": 1.0, "a": 1.0}, "a"),
        ({"plan": 1.0, "a": 3.0, "b": 0.5}, "b"),
        ({"plan": 2.0, "plan, fused": 1.0, "a": 1.5}, "plan, fused"),
        ({"plan": 2.0, "plan, fused": 1.0, "a": 1.0}, "a"),
    ],
)
def test_a_plan_has_to_be_faster_beyond_doubt(seconds, chosen, monkeypatch):
    taking = on_a_clock(monkeypatch)
    calls = {name: taking(s) for name, s in seconds.items()}
    found = comparing.compare_calls(calls, np.inf)
    assert found.chosen == chosen
    rounds = {name: len(times) for name, times in found.call_s.items()}
    close = [name for name, s in seconds.items() if s == min(seconds.values())]
    for name in seconds.keys() - {*close}:  # a plan has to be sure of others
        is_sooner = not chosen.startswith("plan") or name.startswith("plan")
        assert rounds[name] == comparing.ROUNDS[0 if is_sooner else 1]
    (told,) = {rounds[name] for name in close}
    assert told in comparing.ROUNDS
    # Too few calls to be sure, where time is over and calls are long.
    assert not comparing.compare_calls(calls, -np.inf).chosen.startswith("plan")
    short = {name: taking(s / 100) for name, s in seconds.items()}
    found = comparing.compare_calls(short, -np.inf)
    is_at_once = len(close) == 1 and not chosen.startswith("plan")
    most = comparing.ROUNDS[0] if is_at_once else comparing.SURE
    assert max(len(times) for times in found.call_s.values()) == most


def test_what_cannot_run_is_no_rival_of_a_plan_that_does():
    def failing():
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nin detail")

    found = comparing.compare_calls({"plan": int, "a": failing}, np.inf)
    assert found.chosen == "plan"
    assert str(found).endswith("; a failed: RESOURCE_EXHAUSTED: no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        comparing.compare_calls({"plan": failing, "a": int}, np.inf)


def test_of_ways_to_shard_the_fastest_that_can_run_is_a_rival(monkeypatch):
    taking = on_a_clock(monkeypatch)

    def failing(error):
        def call():
            raise error

        return call

    def chosen(until_s=np.inf, **calls):
        best, failed = comparing.fastest(calls.items(), lambda run: run, until_s)
        return [*best], failed

    calls = {"first": taking(2.0), "broken": failing(ValueError()), "fast": taking(1.0)}
    assert chosen(**calls) == (["fast"], {"broken": "ValueError"})
    assert chosen(-np.inf, **calls) == (["first"], {})
    near = {"a": taking(1.5), "b": taking(1.04), "c": taking(1.0), "d": taking(1.3)}
    assert sorted(chosen(**near)[0]) == ["b", "c"]
    assert chosen() == ([], {})
    no_memory = failing(RuntimeError("no memory\nin detail"))
    assert chosen(first=no_memory, other=taking(1.0)) == (["other"], {"first": "no memory"})
    assert chosen(first=no_memory, broken=failing(TypeError("b"))) == (
        [],
        {"first": "no memory", "broken": "b"},
    )
    assert chosen(-np.inf, first=no_memory, other=taking(1.0)) == ([], {"first": "no memory"})
    until_s = comparing.time.monotonic() + 10.0  # there is no time for another that takes 7
    assert chosen(until_s, first=taking(2.0), other=taking(1.0)) == (["first"], {})
