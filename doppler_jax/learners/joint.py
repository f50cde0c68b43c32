"""A joint policy: DOPPLER's networks under one softmax over (frontier task, device) pairs.

An ablation: the logit of a pair is SEL's score of the task plus PLC's logit of the device,
on the same features, so that DOPPLER's factored choice is all that differs.
"""

import dataclasses

import chex
import jax.numpy as jnp

from doppler_jax.learners.stepwise import Pairs, Stepwise, frontier, place_logits
from doppler_jax.policies import model
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.list_schedule import ListSchedule
from doppler_jax.policies.rollout import PolicyTables


@dataclasses.dataclass(frozen=True)
class Joint(Stepwise):
    """Settings of the joint policy."""

    @property
    def block(self) -> int:
        """Steps of which a gradient keeps in memory what they looked at."""
        return 64

    def prepare(self, params: chex.ArrayTree, problem: PolicyInputs) -> PolicyTables:
        """Returns the tables, which one pass of the encoder makes for all episodes."""
        return model.apply(params, self.config, problem)

    def pairs(
        self,
        params: chex.ArrayTree,
        prepared: PolicyTables,
        problem: PolicyInputs,
        state: ListSchedule,
    ) -> Pairs:
        """Returns the choices in a state of the list schedule."""
        del params
        logits, est_s = place_logits(prepared.place, problem, state)
        logits = logits + prepared.score[state.head][:, None]
        possible = frontier(problem, state)[:, None]
        return Pairs(logits=jnp.where(possible, logits, -jnp.inf), est_s=est_s)
