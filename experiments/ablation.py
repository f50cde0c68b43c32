"""What each part of DOPPLER is worth: `python -m experiments.ablation`.

DOPPLER with one part taken out or changed, beside the rivals that learn; within equal seconds
of a cold call or equal simulated executions. Makespans are simulated, mean and deviation over
seeds; * is the least of a row. The paper's figures are measured, after all three stages.
Without stage 2 nothing is simulated but 64 samples.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.learners.doppler import Doppler, policy_candidates
from doppler_jax.learners.learner import Learner
from doppler_jax.learners.stepwise import PerStep
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.loop import train as run_phase
from doppler_jax.training.sim_rl import SimConfig
from experiments import grid
from experiments.catalogue import PAPER
from experiments.grid import Cell, Context, Page, Record, Study
from experiments.learning import learn
from experiments.methods import MethodSettings, method_cells
from experiments.tables import means_table, with_paper

PAPER_MS = {
    "chainmm": {"doppler": 123.4, "SEL learned alone": 127.0, "PLC learned alone": 121.6},
    "ffnn": {"doppler": 47.4, "SEL learned alone": 59.1, "PLC learned alone": 63.2},
    "llama_block": {"doppler": 160.3, "SEL learned alone": 175.6, "PLC learned alone": 172.9},
    "llama_layer": {"doppler": 150.6, "SEL learned alone": 161.7, "PLC learned alone": 159.5},
}
"""The paper's, measured after all three stages."""

NUM_SAMPLES = 64
"""Placements drawn from a policy in the end, beside the best that training met."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method: a learner, of which stage 2 is taken out if it `imitates` alone."""

    learner: Learner
    imitates: bool = False

    def __call__(
        self,
        graph: dj.graphs.TaskGraph,
        costs: dj.Costs,
        budget: dj.search.Budget,
        key: jax.Array,
    ) -> np.ndarray:
        """Returns the best placement `[N]` that training met or its policy proposes."""
        if self.imitates:
            return imitate(graph, costs, budget, key)
        return learn(self.learner, graph, costs, budget, key, samples=NUM_SAMPLES).placement


def _policy(**changes: Any) -> Variant:
    return Variant(Doppler(policy=PolicyConfig(**changes)))


def _simulate(**changes: Any) -> Variant:
    return Variant(Doppler(simulate=SimConfig(**changes)))


VARIANTS: Mapping[str, Variant] = {
    "doppler": Variant(Doppler()),
    "SEL learned alone": _policy(place="earliest"),
    "PLC learned alone": _policy(select="b_level"),
    "encoded at every step": Variant(PerStep()),
    "without stage 1": Variant(Doppler(warm_up=0)),
    "without stage 2": Variant(Doppler(), imitates=True),
    "features without positions": _policy(features="coparent"),
    "the paper's features": _policy(features="paper"),
    "no elites": _simulate(num_elites=0),
    "no local search": _simulate(num_chains=0),
    "batch 64": _simulate(batch=64, minibatches=2, num_chains=min(SimConfig().num_chains, 64)),
}
"""The method by what is changed."""

RIVALS = ("placeto", "gdp", "joint")


@dataclasses.dataclass(frozen=True)
class Asked(MethodSettings):
    """What to compare; `--method` are rivals that learn."""

    variants: tuple[str, ...] = tuple(VARIANTS)


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns the cells of the variants, and of the rivals within evaluations."""
    asked = context.settings
    grid.check_names("--variants", asked.variants, list(VARIANTS))
    methods = [*asked.variants, *asked.method]
    return method_cells(
        context, asked.problems, methods, asked.spends(), asked.seeds, own=VARIANTS
    )


def imitate(
    graph: dj.graphs.TaskGraph, costs: dj.Costs, budget: dj.search.Budget, key: jax.Array
) -> np.ndarray:
    """Returns the best sample `[N]` of a policy that imitates as long as seconds last.

    Imitation simulates nothing: where evaluations are the bound it is as long as usual.
    """
    train_key, draw_key = jax.random.split(key)
    inputs, doppler = make_policy_inputs(graph, costs), Doppler()
    if budget.seconds is not None:
        doppler = dataclasses.replace(doppler, warm_up=2**30)
    params_key, (first, _) = doppler.phases(train_key, inputs, "parallel")
    state, interrupted = run_phase(first, first.begin(doppler.init(params_key, inputs)), budget)
    if interrupted:
        raise KeyboardInterrupt
    policy = dj.policies.Policy(jax.device_get(state.params), doppler.policy)
    drawn = policy_candidates(inputs, policy, draw_key, NUM_SAMPLES)
    return best_placement(graph, costs, drawn)[0]


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns a row per problem and budget, the paper's under it."""
    found = with_paper(records, "problem", PAPER_MS)
    table = means_table(found, ("problem", "budget"), scale=1e3)
    return Page({"Makespans (ms)": table})


QUICK = {"problems": PAPER[:1], "evaluations": (5000,), "seconds": (8.0,), "seeds": 1}

SETTINGS = Asked(problems=PAPER, method=RIVALS, evaluations=(100_000,), seconds=(120.0,))

STUDY = Study("ablation", SETTINGS, cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
