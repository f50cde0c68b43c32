"""The learned methods besides DOPPLER, by their names in `place`."""

from doppler_jax.learners.gdp import Gdp
from doppler_jax.learners.giph import Giph
from doppler_jax.learners.joint import Joint
from doppler_jax.learners.learner import Learner
from doppler_jax.learners.per_step import PerStep
from doppler_jax.learners.placeto import Placeto

LEARNERS: dict[str, Learner] = {
    "doppler_per_step": PerStep(),
    "gdp": Gdp(),
    "giph": Giph(),
    "joint": Joint(),
    "placeto": Placeto(),
    "placeto_once": Placeto(once=True),
}
