"""SEL and PLC as pure functions, for use in any JAX program; see docs/embedding.md.

`features.py` makes what they see of a problem. `model.py` maps it to tables: `encoder.py`
embeds tasks once, `select.py` scores them, `place.py` prepares PLC. `rollout.py` runs episodes
on the tables over a growing `list_schedule.py`, and gives their log-probabilities
(`frontier.py`: of wide graphs).

A device feature is a row of `device_features.py`, a static one a column in `features.py`.
"""

from doppler_jax.policies.features import FEATURE_VERSION as FEATURE_VERSION
from doppler_jax.policies.features import PolicyInputs as PolicyInputs
from doppler_jax.policies.features import make_policy_inputs as make_policy_inputs
from doppler_jax.policies.model import PolicyConfig as PolicyConfig
from doppler_jax.policies.model import apply as apply
from doppler_jax.policies.model import init_params as init_params
from doppler_jax.policies.rollout import Episode as Episode
from doppler_jax.policies.rollout import PolicyTables as PolicyTables
from doppler_jax.policies.rollout import greedy as greedy
from doppler_jax.policies.rollout import in_b_level_order as in_b_level_order
from doppler_jax.policies.rollout import log_prob as log_prob
from doppler_jax.policies.rollout import sample as sample
