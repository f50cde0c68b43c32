"""DOPPLER with message passing at every step, the paper's ablation of once per episode.

At each step the encoder runs again and sees, beside the static features of every task,
whether it is placed and when it starts and finishes in the list schedule so far. The choice
is factored as DOPPLER's: SEL's softmax over the frontier, then PLC's over devices.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.learners.stepwise import Pairs, Stepwise, frontier, place_logits
from doppler_jax.policies import model
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.list_schedule import ListSchedule

NUM_DYNAMIC = 3
"""Features of the state: placed, start, finish."""


@dataclasses.dataclass(frozen=True)
class PerStep(Stepwise):
    """Settings of the policy that encodes at every step."""

    batch: int = 16
    minibatches: int = 1

    @property
    def block(self) -> int:
        """Steps of which a gradient keeps in memory what they looked at."""
        return 4

    def init(self, key: chex.PRNGKey, problem: PolicyInputs) -> chex.ArrayTree:
        """Returns fresh parameters; the key is consumed."""
        rows = problem.task_features.shape[0]
        seen = _with_features(problem, jnp.zeros((rows, NUM_DYNAMIC)))
        return model.init_params(key, self.config, seen)

    def prepare(self, params: chex.ArrayTree, problem: PolicyInputs) -> None:
        """Returns nothing: steps share nothing."""

    def pairs(
        self, params: chex.ArrayTree, prepared: None, problem: PolicyInputs, state: ListSchedule
    ) -> Pairs:
        """Returns the choices in a state of the list schedule."""
        del prepared
        placed = state.device != problem.padded.num_devices
        times_s = jnp.stack([state.start_s, state.finish_s], axis=-1)
        times = jnp.log1p(jnp.where(placed[:, None], times_s, 0.0) / problem.unit_s)
        dynamic = jnp.concatenate([placed[:, None].astype(times.dtype), times], axis=-1)
        tables = model.apply(params, self.config, _with_features(problem, dynamic))

        logits, est_s = place_logits(tables.place, problem, state)
        possible = frontier(problem, state)
        scores = jnp.where(possible, tables.score[state.head], -jnp.inf)
        # A row that is masked, or an empty frontier, must not make a gradient of nan.
        scores = jax.nn.log_softmax(jnp.where(possible.any(), scores, 0.0))
        legal = possible[:, None] & jnp.isfinite(logits)
        logits = jax.nn.log_softmax(jnp.where(possible[:, None], logits, 0.0), axis=-1)
        return Pairs(logits=jnp.where(legal, scores[:, None] + logits, -jnp.inf), est_s=est_s)


def _with_features(problem: PolicyInputs, dynamic: chex.Array) -> PolicyInputs:
    seen = jnp.concatenate([problem.task_features, dynamic], axis=-1)
    return dataclasses.replace(problem, task_features=seen)
