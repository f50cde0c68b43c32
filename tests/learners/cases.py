"""A learner that compiles in a moment, and a problem on which it must learn."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import doppler_jax as dj
from doppler_jax.costs.build import from_edge_delays
from doppler_jax.learners.learner import EpisodeLearner, Explored
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.simulator.batches import simulate_padded

DEVICES = 3


def chainmm_problem(*preset, **cut):
    workload, cluster = (
        dj.workloads.make_workload("chainmm", *preset),
        dj.make_cluster("p100x4"),
    )
    program = dj.trace(workload.fn, *workload.args)
    graph = dj.partition(program, num_shards=4, cluster=cluster, **cut).graph
    return make_policy_inputs(graph, dj.make_costs(graph, cluster))


def fresh(learner, problem, key=0, params=None):
    """The state of an `EpisodeLearner` before its first update, and the update."""
    key, (phase,) = learner.phases(jax.random.key(key), problem, "parallel")
    start = jax.jit(learner.init)(key, problem) if params is None else params
    return phase.begin(start), phase.update


@dataclasses.dataclass(frozen=True)
class Toy(EpisodeLearner):
    """Draws every task's device from one softmax over devices."""

    name: ClassVar[str] = "toy"

    learning_rate: float = 0.3
    cost: int = 1  # simulations of an episode; as many less one of a proposal

    def evaluations(self, num_tasks):
        return self.batch * self.cost

    def proposal_evaluations(self, num_tasks):
        return self.cost - 1

    def init(self, key, problem):
        return {"logits": jnp.zeros(DEVICES)}

    def explore(self, params, problem, key, update, links):
        shape = (self.batch, problem.padded.padded_tasks)
        drawn = jax.random.categorical(key, params["logits"], shape=shape).astype(jnp.int32)
        makespan_s = simulate_padded(problem.padded, drawn, links=links).makespan_s
        lesson = {"device": drawn, "advantage": makespan_s.mean() - makespan_s}
        return Explored(lesson=lesson, placement=drawn, makespan_s=makespan_s)

    def loss(self, params, problem, lesson, update):
        log_p = jax.nn.log_softmax(params["logits"])[lesson["device"]].sum(-1)
        return -(lesson["advantage"] * log_p).mean()

    def draw(self, params, problem, key, count, links):
        shape = (count, problem.padded.padded_tasks)
        drawn = jax.random.categorical(key, params["logits"], shape=shape).astype(jnp.int32)
        return drawn.at[0].set(params["logits"].argmax().astype(jnp.int32))


def slow_device():
    """A chain whose tensors take long to move; device 2 is ten times faster than the others."""
    edges = [(v, v + 1, 3.0) for v in range(7)]
    graph, costs = from_edge_delays(np.ones(8), edges, num_devices=DEVICES)
    return graph, costs.replace(compute_s=costs.compute_s * np.array([1.0, 1.0, 0.1]))
