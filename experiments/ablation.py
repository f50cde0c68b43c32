"""What each part of DOPPLER is worth: `python -m experiments.ablation`.

DOPPLER with one part taken out or changed, beside the rivals that learn; within equal seconds
of a cold call or equal simulated executions.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial

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
from experiments.methods import MethodSettings, Spend, method_cells, place_cell
from experiments.tables import by, means_table

PAPER_MS = {
    "chainmm": {"doppler": 123.4, "SEL learned alone": 127.0, "PLC learned alone": 121.6},
    "ffnn": {"doppler": 47.4, "SEL learned alone": 59.1, "PLC learned alone": 63.2},
    "llama_block": {"doppler": 160.3, "SEL learned alone": 175.6, "PLC learned alone": 172.9},
    "llama_layer": {"doppler": 150.6, "SEL learned alone": 161.7, "PLC learned alone": 159.5},
}
"""The paper's, measured after all three stages."""

NUM_SAMPLES = 64
"""Placements drawn from a policy in the end, beside the best that training met."""


def _simulating(**changes: int) -> Doppler:
    """Returns DOPPLER with a changed stage 2."""
    return Doppler(simulate=SimConfig(**changes))  # type: ignore[arg-type]


VARIANTS: Mapping[str, Learner] = {
    "doppler": Doppler(),
    "SEL learned alone": Doppler(policy=PolicyConfig(place="earliest")),
    "PLC learned alone": Doppler(policy=PolicyConfig(select="b_level")),
    "encoded at every step": PerStep(),
    "without stage 1": Doppler(warm_up=0),
    "without stage 2": Doppler(),  # see `imitate`
    "features without positions": Doppler(policy=PolicyConfig(features="coparent")),
    "the paper's features": Doppler(policy=PolicyConfig(features="paper")),
    "no elites": _simulating(num_elites=0),
    "no local search": _simulating(num_chains=0),
    "batch 64": _simulating(
        batch=64, minibatches=2, num_chains=min(SimConfig().num_chains, 64)
    ),
}
"""Settings of the method by what is changed."""

RIVALS = ("placeto", "gdp", "joint")


@dataclasses.dataclass(frozen=True)
class AblationSettings(MethodSettings):
    """What to compare; `--method` are rivals that learn."""

    variants: tuple[str, ...] = tuple(VARIANTS)


def cells(context: Context[AblationSettings]) -> list[Cell]:
    """Returns the cells of the variants, and of the rivals within evaluations."""
    asked = context.settings
    grid.check_names("--variants", asked.variants, list(VARIANTS))

    def cell(problem: str, spend: Spend, seed: int, name: str) -> Cell:
        own = imitate if name == "without stage 2" else partial(train, VARIANTS[name])

        def make() -> Record:
            return place_cell(context.problem(problem), name, spend, seed, own=own)

        key = {"problem": problem, "variant": name, **spend.key, "seed": seed}
        return Cell(key | {"learner": repr(VARIANTS[name])}, make)

    which = itertools.product(
        asked.problems, asked.spends(), range(asked.seeds), asked.variants
    )
    rivals = method_cells(context, asked.problems, asked.method, asked.spends(), asked.seeds)
    return [cell(*each) for each in which] + rivals


def train(
    learner: Learner, graph: dj.TaskGraph, costs: dj.Costs, budget: dj.Budget, key: jax.Array
) -> np.ndarray:
    """Returns the best placement `[N]` that training met or its policy proposes."""
    return learn(learner, graph, costs, budget, key, samples=NUM_SAMPLES).placement


def imitate(
    graph: dj.TaskGraph, costs: dj.Costs, budget: dj.Budget, key: jax.Array
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
    policy = dj.Policy(jax.device_get(state.params), doppler.policy)
    drawn = policy_candidates(inputs, policy, draw_key, NUM_SAMPLES)
    return best_placement(graph, costs, drawn)[0]


def report(context: Context[AblationSettings], records: list[Record]) -> Page:
    """Returns a row per problem and budget, the paper's under it."""
    found = [record | {"what": record.get("variant") or record["method"]} for record in records]
    for problem in by(records, "problem"):
        paper = PAPER_MS.get(problem.split(":")[0], {})
        where = {"problem": f"{problem}, paper"}
        found += [where | {"what": w, "makespan_s": 1e-3 * ms} for w, ms in paper.items()]
    table = means_table(found, ("problem", "budget"), "what", scale=1e3)
    return Page(
        "Simulated makespans (ms), mean and deviation over seeds; * is the least of a row. The "
        "paper's figures are measured, after all three stages. Without stage 2 nothing is "
        f"simulated but {NUM_SAMPLES} samples.\n\n{table}"
    )


QUICK = {
    "problems": PAPER[:1], "evaluations": (5000,), "seconds": (8.0,), "seeds": 1,
}  # fmt: skip

STUDY = Study(
    "ablation",
    AblationSettings(problems=PAPER, method=RIVALS, evaluations=(100_000,), seconds=(120.0,)),
    cells,
    report,
    QUICK,
)

if __name__ == "__main__":
    STUDY.command()
