"""Problems of one padded size, an untrained policy, and who draws from it."""

from functools import partial

import jax
import pytest

from doppler_jax.learners import doppler as doppler_learner
from doppler_jax.methods import DEFAULT_METHOD, METHODS
from doppler_jax.methods.learned import doppler
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import init_params
from doppler_jax.types import Policy
from tests.methods.cases import SMALL, from_samples, make


@pytest.fixture(scope="module", autouse=True)
def _one_small_compilation():
    # Every problem of this file has one padded size, and doppler trains a small policy.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "doppler", doppler(SMALL))
        patch.setitem(METHODS, DEFAULT_METHOD, from_samples(None))
        yield


@pytest.fixture(scope="module")
def policy():
    """Untrained: any parameters must place legally."""
    init = jax.jit(partial(init_params, config=SMALL))
    problem = make_policy_inputs(*make("one task"))
    return Policy(params=init(jax.random.key(1), problem=problem), config=SMALL)


@pytest.fixture
def drawn_from(monkeypatch, policy):
    """The policies that placements were drawn from; the base policy is the untrained one."""
    policies = []
    draw = doppler_learner.draw_plans

    def candidates(problem, policy, *rest):
        policies.append(policy)
        return draw(problem, policy, *rest)

    monkeypatch.setattr(doppler_learner, "draw_plans", candidates)
    monkeypatch.setitem(METHODS, DEFAULT_METHOD, from_samples(policy))
    return policies
