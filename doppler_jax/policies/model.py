"""The pair of policies as one Flax module, and its pure use."""

import dataclasses
from typing import Any, Literal

import chex
import flax.linen as nn
import jax.numpy as jnp

from doppler_jax.policies.encoder import Encoder
from doppler_jax.policies.features import FEATURE_VERSION, Problem
from doppler_jax.policies.place import NUM_DEVICE_FEATURES, Place
from doppler_jax.policies.rollout import PolicyTables
from doppler_jax.policies.select import Select

Features = Literal["position", "coparent", "paper"]
"""What the policies see: the paper's features; beside them the co-parent affinity, which
tells siblings apart once a relative is placed; beside both, each task's position in a
topological order, which tells all tasks apart, so that any placement can be learned, at the
price that symmetric tasks depend on the order of their ids."""

OCTAVES = 10
"""Frequencies of a position's sines and cosines (Vaswani et al. 2017)."""


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Sizes of the networks; N and D are no part of them."""

    width: int = 32  # of embeddings and hidden layers
    rounds: int = 3  # of message passing
    member_width: int = 8  # of what PLC knows of the tasks on a device
    features: Features = "position"  # see `Features`
    feature_version: int = FEATURE_VERSION


class DopplerPolicy(nn.Module):
    """Encoder, SEL and PLC: maps a problem to the tables that episodes run on."""

    config: PolicyConfig

    @nn.compact
    def __call__(self, problem: Problem) -> PolicyTables:
        """Returns the tables of the problem."""
        if self.config.features == "position":
            seen = jnp.concatenate([problem.task_features, _positions(problem)], axis=-1)
            problem = dataclasses.replace(problem, task_features=seen)
        embedding = Encoder(self.config.width, self.config.rounds)(problem)
        return PolicyTables(
            score=Select(self.config.width)(problem, embedding),
            place=Place(
                self.config.width,
                NUM_DEVICE_FEATURES[self.config.features],
                self.config.member_width,
            )(problem, embedding),
        )


def _positions(problem: Problem) -> chex.Array:
    """Returns sines and cosines of each task's share of the topological order, `[N + 1, K]`."""
    num_tasks = problem.instance.num_tasks
    real = jnp.asarray(problem.topological_rank) < num_tasks
    share = problem.topological_rank / jnp.maximum(num_tasks, 1)
    angle = (
        share[:, None] * (2 * jnp.pi * jnp.exp2(jnp.arange(OCTAVES, dtype=jnp.float32)))[None]
    )
    waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return jnp.where(real[:, None], waves, 0.0)


def init_params(key: chex.PRNGKey, config: PolicyConfig, problem: Problem) -> chex.ArrayTree:
    """Returns fresh parameters; `problem` is any, their shapes do not depend on it."""
    return DopplerPolicy(config).init(key, problem)["params"]


def apply(params: chex.ArrayTree, config: PolicyConfig, problem: Problem) -> PolicyTables:
    """Runs the encoder and both heads: a pure function, once per update or placement."""
    tables: Any = DopplerPolicy(config).apply({"params": params}, problem)
    return tables
