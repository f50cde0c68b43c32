"""Time against the number of tasks: `python -m experiments.scaling`.

Every learned method on layered graphs: seconds of an update, and to place a graph with a
policy at hand (`dj.place`: features, one greedy proposal, its judgement by the oracle); first
the cold call, which compiles, then the median of warm ones. A batch is the episodes of an
update. A method ends where its next update would take too long. Slopes are of log time over log
tasks, from the smallest to the largest graph, of an update and of placing, warm.
"""

import dataclasses
import itertools
import time
from functools import partial
from typing import Any

import jax

import doppler_jax as dj
from doppler_jax.learners.doppler import Doppler
from doppler_jax.learners.learner import EpisodeLearner, Learner
from doppler_jax.learners.registry import LEARNERS
from doppler_jax.policies.features import make_policy_inputs
from experiments import grid
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import in_turns, seconds_of, warm
from experiments.methods import cold
from experiments.tables import by, growth, table

SHOWN = ("method", "batch", "tasks")


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What to time."""

    method: tuple[str, ...] = tuple(LEARNERS)
    sizes: tuple[int, ...] = (100, 300, 1000, 3000, 10_000)
    """Tasks of the graphs."""
    num_devices: int = 4
    batch: tuple[int, ...] = (16,)
    """Episodes of an update."""
    rounds: int = 3
    limit_s: float = 600.0
    """Of an update; what would take longer, if time grew as the square, is left out."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per method and size, the smallest first."""
    asked = context.settings
    grid.check_names("--method", asked.method, list(LEARNERS))
    key = context.key("method", "sizes", "batch", "limit_s")
    found = []
    for method, batch in itertools.product(asked.method, asked.batch):
        times: dict[int, float] = {}  # of updates, by size
        for size in sorted(set(asked.sizes)):
            run = partial(time_method, context, method, batch, size, times)
            found.append(Cell({"method": method, "batch": batch, "tasks": size, **key}, run))
    return found


def time_method(
    context: Context[Asked], method: str, batch: int, size: int, times: dict[int, float]
) -> Record:
    """Returns seconds of an update of a method, and of placing a graph with its policy."""
    asked = context.settings
    if times and max(times.values()) * (size / max(times)) ** 2 > asked.limit_s:
        return {"refused": "it would take too long"}
    problem = context.problem(f"layers-{size}@{asked.num_devices}")
    learner = small_updates(LEARNERS[method], batch)
    inputs = make_policy_inputs(problem.graph, problem.costs)
    params_key, phases = learner.phases(jax.random.key(0), inputs, "parallel")
    params = learner.init(params_key, inputs)
    policy = dj.policies.Policy(params, learner.settings, learner.name)
    state = phases[-1].begin(params)
    # One proposal, what it simulates on its way and its judgement.
    proposal = learner.proposal_evaluations(inputs.padded.padded_tasks) + 1
    options: dict[str, Any] = {"method": method, "policy": policy, "max_evaluations": proposal}

    def place_s() -> float:
        began = time.perf_counter()
        if dj.place(problem.graph, problem.costs, **options).interrupted:
            raise KeyboardInterrupt
        return time.perf_counter() - began

    runs = {"update": lambda: seconds_of(lambda: phases[-1].update(state)), "place": place_s}
    with cold():
        seconds = in_turns(runs, asked.rounds)
    times[size] = warm(seconds["update"])
    return {
        "first placing, cold_s": seconds["place"][0],
        "first update, cold_s": seconds["update"][0],
        "placing_s": warm(seconds["place"]),
        "update_s": times[size],
        "per episode_s": times[size] / phases[-1].episodes,
        "per execution_s": times[size] / phases[-1].evaluations,
    }


def small_updates(learner: Learner, batch: int) -> Learner:
    """Returns a learner whose updates are of `batch` episodes, in one step."""
    if isinstance(learner, Doppler):
        usual = learner.simulate
        few = {name: min(getattr(usual, name), batch) for name in ("num_elites", "num_chains")}
        simulate = dataclasses.replace(usual, batch=batch, minibatches=1, **few)
        return dataclasses.replace(learner, simulate=simulate)
    assert isinstance(learner, EpisodeLearner)
    return dataclasses.replace(learner, batch=batch, minibatches=1)


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns the table, and how each method's times grow."""
    done = [record for record in records if "refused" not in record]
    rows = [
        {name: value for name, value in r.items() if name in SHOWN or name.endswith("_s")}
        for r in done
    ]
    slopes = [
        f"{method} {growth(runs, 'update_s'):.2f} and {growth(runs, 'placing_s'):.2f}"
        for (method, _), runs in by(done, "method", "batch").items()
        if len(runs) > 1
    ]
    return Page({"": table(rows), "Slopes": "; ".join(slopes)})


QUICK = {"sizes": (125, 1000), "batch": (4,), "limit_s": 20.0}

STUDY = Study("scaling", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
