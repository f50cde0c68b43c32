"""`place`: what is minimised, what is reported, what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.methods import Candidates, doppler, searched
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import init_params
from doppler_jax.search.walks import Annealing
from tests.methods.cases import BOUND, SMALL, make, tight
from tests.simulator.cases import small_problem


@pytest.mark.parametrize(
    "objective",
    [dj.Objective("serial"), dj.Objective(num_noise=3, noise_sigma=0.5, quantile=0.9)],
)
def test_objectives_are_what_is_minimised_and_reported(objective):
    graph, costs = make("unequal")
    listed = dj.place(graph, costs, method="critical_path", objective=objective)
    placed = dj.place(
        graph, costs, method="random", max_evaluations=100 * BOUND, objective=objective
    )
    assert 95 * BOUND < placed.evaluations <= 100 * BOUND
    assert placed.objective_s < listed.objective_s
    links = objective.links
    schedule = dj.simulate_oracle(graph, costs, placed.placement, links=links)
    assert placed.makespan_s == dj.makespan_s(schedule)
    assert (placed.objective_s == placed.makespan_s) == (not objective.num_noise)
    replayed = dj.simulate_oracle(
        graph, costs, placed.placement, links=links, queue="priority", priority=placed.priority
    )
    np.testing.assert_array_equal(replayed.start_s, schedule.start_s)


def test_what_is_returned_fits_into_memory():
    graph, costs = make("unequal")
    costs = tight(graph, costs, 0.95)
    with pytest.raises(
        ValueError, match="'critical_path' found no placement that fits: device"
    ):
        dj.place(graph, costs, method="critical_path")
    placed = dj.place(graph, costs, method="annealing", max_evaluations=40 * BOUND)
    assert (dj.peak_memory_bytes(graph, costs, placed.schedule) <= costs.capacity_bytes).all()
    assert np.isfinite(placed.objective_s)


def test_where_nothing_fits_nothing_is_returned():
    # Three weights of 6 bytes on two devices of 10: any one fits, two do not.
    weights = [(dj.RESIDENT, 6, [v]) for v in range(3)]
    graph, costs = small_problem([1, 1, 1], [], 2, weights)
    costs = costs.replace(capacity_bytes=np.full(2, 10.0))
    with pytest.raises(ValueError, match=r"found no placement that fits: device \d needs 12"):
        dj.place(graph, costs, method="annealing", max_evaluations=40 * BOUND)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "heft9"}, "unknown method 'heft9'; known: annealing, cpop"),
        (
            {"method": "single", "policy": dj.Policy(params={}, config=SMALL)},
            "method 'single' takes no policy",
        ),
        ({"budget_s": 0.0}, "budget_s is 0.0; expected more than 0"),
        ({"budget_s": float("nan")}, "budget_s is nan"),
        ({"max_evaluations": 0}, "max_evaluations is 0; expected more than 0"),
        ({"max_evaluations": -3}, "max_evaluations is -3"),
        ({"objective": "serial"}, "objective is 'serial'; expected a doppler_jax.Objective"),
        (
            {"method": "exact", "objective": dj.Objective(num_noise=2)},
            "'exact' knows links 'parallel' without noise",
        ),
    ],
)
def test_bad_requests_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dj.place(*make("unequal"), **changes)


def test_a_method_may_be_given_in_place_of_its_name():
    def mine(request):
        return Candidates(np.ones((1, request.graph.num_tasks), int), evaluations=5)

    graph, costs = make("unequal")
    placed = dj.place(graph, costs, method=mine)
    assert (placed.method, placed.evaluations, set(placed.placement)) == ("mine", 5, {1})
    annealed = dj.place(graph, costs, method=searched(Annealing()), max_evaluations=BOUND)
    named = dj.place(graph, costs, method="annealing", max_evaluations=BOUND)
    np.testing.assert_array_equal(annealed.placement, named.placement)


def test_ablations_are_settings_and_take_policies_of_their_method():
    graph, costs = make("unequal")
    config = dataclasses.replace(SMALL, select="b_level")
    params = init_params(jax.random.key(1), config, make_policy_inputs(graph, costs))
    policy = dj.Policy(params=params, config=config)
    placed = dj.place(graph, costs, method=doppler(config), policy=policy, max_evaluations=4)
    assert (placed.method, placed.evaluations) == ("doppler", 4)
    assert not {"doppler_sel", "doppler_plc", "placeto_once"} & set(dj.list_methods())


@pytest.mark.parametrize(
    "objective", [dj.Objective(), dj.Objective(num_noise=2, noise_sigma=0.2)]
)
def test_a_seed_is_what_its_key_is(objective):
    graph, costs = make("unequal")
    options = {"method": "random", "max_evaluations": 10, "objective": objective}
    first, second, third, other = (
        dj.place(graph, costs, key=key, **options).placement
        for key in (7, jax.random.key(7), None, 0)
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(third, other)
    assert (first != other).any()
    with pytest.raises(ValueError, match=r"key is the seed -1; expected 0 to 4294967295"):
        dj.place(graph, costs, key=-1)
