"""The pair of policies as one Flax module, and its pure use."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.policies.device_features import column, count_features
from doppler_jax.policies.encoder import Encoder
from doppler_jax.policies.features import (
    FEATURE_VERSION,
    PolicyInputs,
    sinusoids,
    with_features,
)
from doppler_jax.policies.place import PRECISION, Place, earliest_tables
from doppler_jax.policies.rollout import PolicyTables
from doppler_jax.policies.select import Select, b_level_scores

Features = Literal["position", "coparent", "paper", "general"]
"""What the policies see: the paper's features; beside them the co-parent affinity, which
tells siblings apart once a relative is placed; beside both, each task's position in a
topological order, which tells all tasks apart, so that any placement can be learned, at the
price that symmetric tasks depend on the order of their ids. `general`, for policies of many
graphs, has in place of positions what the graph is like as a whole, and device features that
compare finishes."""

SelectRule = Literal["learned", "b_level"]
"""SEL: learned, or the teacher's largest b-level (the ablation "PLC only")."""

PlaceRule = Literal["learned", "earliest"]
"""PLC: learned, or the teacher's earliest start (the ablation "SEL only")."""


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Sizes of the networks; N and D are no part of them."""

    width: int = 32  # of embeddings and hidden layers
    rounds: int = 3  # of message passing
    member_width: int = 8  # of what PLC knows of the tasks on a device
    features: Features = "position"  # see `Features`
    select: SelectRule = "learned"
    place: PlaceRule = "learned"
    feature_version: int = FEATURE_VERSION

    def __post_init__(self) -> None:
        if self.feature_version != FEATURE_VERSION:
            raise ValueError(
                f"a policy of feature version {self.feature_version}; this library computes "
                f"{FEATURE_VERSION}"
            )


class DopplerPolicy(nn.Module):
    """Encoder, SEL and PLC: maps a problem to the tables that episodes run on."""

    config: PolicyConfig

    @nn.compact
    def __call__(self, problem: PolicyInputs) -> PolicyTables:
        """Returns the tables of the problem."""
        config = self.config
        if config.features == "position":
            problem = with_features(problem, _positions(problem))
        elif config.features == "general":
            rows = (problem.task_features.shape[0], problem.graph_features.shape[0])
            about = jnp.broadcast_to(problem.graph_features[None], rows)
            problem = with_features(problem, about)
        embedding = Encoder(config.width, config.rounds)(problem)
        num_features = count_features(config.features)
        if config.select == "b_level":
            score = b_level_scores(problem)
        else:
            score = Select(config.width)(problem, embedding)
        if config.place == "earliest":
            place = earliest_tables(problem, num_features)
        else:
            place = Place(config.width, num_features, config.member_width)(problem, embedding)
        return PolicyTables(score=score, place=place)


def _positions(problem: PolicyInputs) -> Array:
    """Returns sines and cosines of each task's share of the topological order, `[N + 1, K]`."""
    num_tasks = problem.padded.num_tasks
    real = jnp.asarray(problem.topological_rank) < num_tasks
    share = problem.topological_rank / jnp.maximum(num_tasks, 1)
    return jnp.where(real[:, None], sinusoids(share), 0.0)


def init_params(key: PRNGKey, config: PolicyConfig, problem: PolicyInputs) -> ArrayTree:
    """Returns fresh parameters; `problem` is any, their shapes do not depend on it."""
    return DopplerPolicy(config).init(key, problem)["params"]


B_LEVEL = 3
"""Column of the b-level among the task features."""

LATE, RELATED = column("late finish"), column("placed relatives there")
"""The device features that a fresh policy reads."""

SHARPNESS, TOGETHER = 8.0, 3.0
"""What fresh scores make of b-levels and of late finishes, and of relatives."""


def init_list_scheduler(key: PRNGKey, policy: PolicyConfig, problem: PolicyInputs) -> ArrayTree:
    """Returns fresh parameters whose greedy choices are a list scheduler's; consumes the key.

    SEL takes the largest b-level, PLC an early finish beside the tasks that belong together:
    a hidden unit for each hands on just that. Training goes on from there.

    Raises:
      ValueError: the policy has not the features `general`, or SEL or PLC is not learned.
    """
    if (policy.features, policy.select, policy.place) != ("general", "learned", "learned"):
        raise ValueError(f"a base policy needs features 'general', all learned; got {policy}")
    params = jax.jit(init_params, static_argnums=1)(key, policy, problem)
    params = jax.tree.map(jnp.asarray, params)
    select, place = params["Select_0"], params["Place_0"]
    own, hidden, score = (select[f"Dense_{i}"]["kernel"] for i in range(3))
    first_own = hidden.shape[0] - own.shape[1]  # after embedding and path sums
    select["Dense_0"]["kernel"] = _unit(own, 0, B_LEVEL)
    select["Dense_1"]["kernel"] = _unit(hidden, 0, first_own)
    select["Dense_2"]["kernel"] = score.at[0].set(SHARPNESS)
    task = place["Dense_1"]["kernel"]
    place["Dense_1"]["kernel"] = task.at[:, :2].set(0.0)
    place["member_kernel"] = place["member_kernel"].at[:, :2].set(0.0)
    place["kernel"] = _unit(_unit(place["kernel"], 0, LATE), 1, RELATED)
    place["out"] = place["out"].at[:2, 0].set(jnp.array([-SHARPNESS, TOGETHER]))
    return params


def _unit(kernel: Array, column: int, row: int) -> Array:
    """Returns the kernel with a column that passes on one input alone."""
    return kernel.at[:, column].set(0.0).at[row, column].set(1.0)


def apply(params: ArrayTree, config: PolicyConfig, problem: PolicyInputs) -> PolicyTables:
    """Runs the encoder and both heads: a pure function, once per update or placement."""
    with jax.default_matmul_precision(PRECISION):
        tables: Any = DopplerPolicy(config).apply({"params": params}, problem)
    return tables
