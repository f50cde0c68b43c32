"""What training for one problem is told of its budget, and what of it is judged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax import learned
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.simulator.finalists import NUM_FINALISTS
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.state import Elites, TrainState


@pytest.mark.parametrize(
    ("bound", "search_evaluations"),
    [
        (300, 0),
        (100_000, 0),
        (204_799, 0),  # 400 updates of 256 episodes, and a round less than each could have
        (204_800, 2 * 128),
        (300_000, 3 * 128),
        (1_000_000, 17 * 128),
        (None, 17 * 128),
    ],
)
def test_local_search_takes_what_episodes_leave(monkeypatch, bound, search_evaluations):
    given = {}

    def train(problem, key, **settings):
        given.update(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(learned, "train_policy", train)
    with pytest.raises(KeyboardInterrupt):
        learned.learn_placements(
            None, 4, jax.random.key(0), config=PolicyConfig(), budget_s=1.0,
            max_evaluations=bound, links="serial",
        )  # fmt: skip
    config = given["simulate"]
    assert config.search_evaluations == search_evaluations
    assert (config.batch, config.links) == (SimConfig().batch, "serial")
    assert given["max_evaluations"] == bound
    if bound is not None and search_evaluations:
        assert bound // config.evaluations >= learned.LEAST_UPDATES


def test_candidates_are_the_best_a_state_holds_each_from_where_it_is():
    def rows(first, count):
        return jnp.arange(first, first + count, dtype=jnp.int32)[:, None].repeat(6, 1)

    def state(best_s, elites_s, chains_s):
        nothing = jnp.zeros((), jnp.int32)
        return TrainState(
            params=(), opt_state=(), key=jax.random.key(0), update=nothing, episodes=nothing,
            evaluations=nothing, best_placement=rows(0, 1)[0], best_makespan_s=best_s,
            elites=Elites(placement=rows(10, len(elites_s)), makespan_s=elites_s),
            chain_placement=rows(20, len(chains_s)), chain_makespan_s=chains_s,
        )  # fmt: skip

    def chosen(*makespans):
        found = learned.state_candidates(state(*map(jnp.array, makespans)), 4)
        assert found.shape[1] == 4
        assert found.dtype == np.int64
        assert (found == found[:, :1]).all()
        return found[:, 0].tolist()

    inf = np.inf
    assert chosen(3.0, [3.0, 5.0, inf], [4.0, 3.0, 6.0]) == [0, 10, 21, 20, 11, 22]
    assert chosen(3.0, [], []) == [0]
    assert chosen(inf, [inf], [inf, inf]) == [0]  # what a state begins with is a placement
    many = chosen(1.0, [2.0], np.linspace(9.0, 3.0, 128))
    assert many == [0, 10, *range(147, 147 - NUM_FINALISTS + 3, -1)]
    assert len(many) + 1 == NUM_FINALISTS  # and the teacher's
