"""SEL and PLC as pure functions, for use in any JAX program; see docs/embedding.md."""

from doppler_jax.policies.features import FEATURE_VERSION, PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig, apply, init_params
from doppler_jax.policies.rollout import (
    Episode,
    PolicyTables,
    greedy,
    in_b_level_order,
    log_prob,
    sample,
)

__all__ = [
    "FEATURE_VERSION",
    "Episode",
    "PolicyConfig",
    "PolicyInputs",
    "PolicyTables",
    "apply",
    "greedy",
    "in_b_level_order",
    "init_params",
    "log_prob",
    "make_policy_inputs",
    "sample",
]
