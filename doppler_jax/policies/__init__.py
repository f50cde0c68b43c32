"""SEL and PLC as pure functions, for use in any JAX program; see docs/how/policies.md.

`features.py` makes what they see of a problem. `model.py` maps it to tables: `encoder.py`
embeds tasks once, `select.py` scores them, `place.py` prepares PLC. `rollout.py` runs episodes
on the tables over a growing `list_schedule.py`, and gives their log-probabilities
(`frontier.py`: of wide graphs).

A device feature is a row of `device_features.py`, a static one a column in `features.py`.

Checkpoints are read and written by `doppler_jax/policy_files.py`, loaded when it is asked for.
"""

from typing import TYPE_CHECKING, Any

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
from doppler_jax.types import Policy

if TYPE_CHECKING:
    from doppler_jax.policy_files import load_policy, save_policy

__all__ = [
    "FEATURE_VERSION",
    "Episode",
    "Policy",
    "PolicyConfig",
    "PolicyInputs",
    "PolicyTables",
    "apply",
    "greedy",
    "in_b_level_order",
    "init_params",
    "load_policy",
    "log_prob",
    "make_policy_inputs",
    "sample",
    "save_policy",
]


def __getattr__(name: str) -> Any:
    if name in ("load_policy", "save_policy"):  # they need the trainer, which needs us
        from doppler_jax import policy_files

        return getattr(policy_files, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
