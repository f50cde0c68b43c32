"""What training for one problem is told of its budget."""

import jax
import pytest

from doppler_jax import learned
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.sim_rl import SimConfig


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
