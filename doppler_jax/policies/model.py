"""The pair of policies as one Flax module, and its pure use."""

import dataclasses
from typing import Any

import chex
import flax.linen as nn

from doppler_jax.policies.encoder import Encoder
from doppler_jax.policies.features import FEATURE_VERSION, Problem
from doppler_jax.policies.place import Place
from doppler_jax.policies.rollout import PolicyTables
from doppler_jax.policies.select import Select


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Sizes of the networks; N and D are no part of them."""

    width: int = 32  # of embeddings and hidden layers
    rounds: int = 3  # of message passing
    feature_version: int = FEATURE_VERSION


class DopplerPolicy(nn.Module):
    """Encoder, SEL and PLC: maps a problem to the tables that episodes run on."""

    config: PolicyConfig

    @nn.compact
    def __call__(self, problem: Problem) -> PolicyTables:
        """Returns the tables of the problem."""
        embedding = Encoder(self.config.width, self.config.rounds)(problem)
        return PolicyTables(
            score=Select(self.config.width)(problem, embedding),
            place=Place(self.config.width)(problem, embedding),
        )


def init_params(key: chex.PRNGKey, config: PolicyConfig, problem: Problem) -> chex.ArrayTree:
    """Returns fresh parameters; `problem` is any, their shapes do not depend on it."""
    return DopplerPolicy(config).init(key, problem)["params"]


def apply(params: chex.ArrayTree, config: PolicyConfig, problem: Problem) -> PolicyTables:
    """Runs the encoder and both heads: a pure function, once per update or placement."""
    tables: Any = DopplerPolicy(config).apply({"params": params}, problem)
    return tables
