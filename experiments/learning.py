"""Training as studies do it: a learner on a problem, then the best of what it met and draws."""

from typing import Any, NamedTuple

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.learners.learner import Learner, Trained, train_learner
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.simulator.finalists import best_placement


class Learned(NamedTuple):
    """What training came to."""

    trained: Trained
    drawn: np.ndarray  # [K, N], of the policy; the first is greedy
    placement: np.ndarray  # [N], the best of these and of what training met


def learn(
    learner: Learner,
    graph: dj.graphs.TaskGraph,
    costs: dj.Costs,
    budget: dj.search.Budget,
    key: jax.Array,
    *,
    samples: int,
    links: str = "parallel",
    params: Any = None,
) -> Learned:
    """Trains, from `params` or from scratch, and draws so many placements of the policy.

    Raises:
      KeyboardInterrupt: training was stopped; what it found is not what its budget gives.
    """
    train_key, draw_key = jax.random.split(key)
    inputs = make_policy_inputs(graph, costs)
    trained = train_learner(learner, inputs, train_key, budget, links=links, params=params)
    if trained.interrupted:
        raise KeyboardInterrupt
    drawn = learner.propose(trained.policy.params, inputs, draw_key, samples, links).placements
    candidates = np.concatenate([trained.placements, drawn])
    return Learned(trained, drawn, best_placement(graph, costs, candidates, links)[0])
