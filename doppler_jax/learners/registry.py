"""The learned methods, by their names."""

from typing import Any

from doppler_jax.learners.doppler import Doppler
from doppler_jax.learners.gdp import Gdp
from doppler_jax.learners.giph import Giph
from doppler_jax.learners.learner import Learner
from doppler_jax.learners.placeto import Placeto
from doppler_jax.learners.stepwise import Joint, PerStep

LEARNERS: dict[str, Learner] = {
    learner.name: learner for learner in (Doppler(), Gdp(), Giph(), Joint(), Placeto())
}
"""The learned methods with their usual settings, by their names in `place`."""

POLICY_SETTINGS: dict[str, Any] = {
    learner.name: type(learner.settings) for learner in (*LEARNERS.values(), PerStep())
}
"""What the settings of a method's policies are, ablations included."""
