"""SEL and PLC as pure functions, for use in any JAX program; see docs/embedding.md.

`features.py` makes what they see of a problem. `model.py` maps it to tables: `encoder.py`
embeds tasks once, `select.py` scores them, `place.py` prepares PLC. `rollout.py` runs episodes
on the tables over a growing `list_schedule.py`, and gives their log-probabilities
(`frontier.py`: of wide graphs).

A device feature is a row of `device_features.py`, a static one a column in `features.py`.
"""

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
