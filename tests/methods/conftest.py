"""One small compilation for all methods, an untrained policy, and who draws from it."""

from functools import partial

import jax
import pytest

from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.methods import DEFAULT_METHOD, METHODS, searches
from doppler_jax.methods.learned import doppler
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import init_params
from doppler_jax.search.random_search import RandomSearch
from doppler_jax.training.checkpoint import Policy
from tests.methods.cases import BOUND, SMALL, from_samples, make
from tests.search.cases import one_size


@pytest.fixture(scope="module", autouse=True)
def _one_small_compilation():
    # Every problem of this file has one padded size, and doppler trains a small policy.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "doppler", doppler(SMALL))
        patch.setitem(METHODS, DEFAULT_METHOD, from_samples(None))
        patch.setattr(searches, "RandomSearch", lambda: RandomSearch(draws=BOUND))
        one_size(patch)
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

    def candidates(problem, policy, *rest):
        policies.append(policy)
        return policy_candidates(problem, policy, *rest)

    monkeypatch.setattr(searches, "policy_candidates", candidates)
    monkeypatch.setitem(METHODS, DEFAULT_METHOD, from_samples(policy))
    return policies
