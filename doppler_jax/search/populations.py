"""Searches that keep a population: evolution, and random search.

Evolution is of the steady state (Whitley 1989): each child replaces the worst member if it is
better. It takes some tasks' devices from a second parent, each task with probability one half
or a stretch of the topological order; then a few random moves change it. Several populations
evolve beside each other; after equal shares of the budget the best of all is sent to each.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from doppler_jax.search.problem import SearchProblem

if TYPE_CHECKING:
    from doppler_jax.search.kernels import Population

LEAST_CHILDREN = 8
"""Per member of a population: budgets that allow less take fewer or smaller ones."""


@dataclasses.dataclass(frozen=True)
class Evolution:
    """Settings of evolution."""

    members: int = 2  # populations
    parents: int = 32  # in each
    mutations: int = 3  # at most, per child
    crossover: float = 0.5  # share of children with two parents

    @property
    def starts(self) -> int:
        return self.parents

    def fit(self, evaluations: int) -> Self:
        most = max(evaluations // LEAST_CHILDREN, 1)
        parents = min(self.parents, most)
        members = max(min(self.members, most // parents), 1)
        return dataclasses.replace(self, members=members, parents=parents)

    def begin(self, problem: SearchProblem, starts: np.ndarray, seed: int) -> "Population":
        return make_population(problem, starts, seed)

    def run(
        self, problem: SearchProblem, member: "Population", steps: int, begin: float, end: float
    ) -> int:
        from doppler_jax.search.kernels import breed

        del begin, end
        parts = (self.mutations, self.crossover, False, problem.target_s)
        return breed(problem.aim, member, steps, *parts)

    def best(self, member: "Population") -> tuple[np.ndarray, np.ndarray]:
        return member.placement, member.value_s

    def learn(
        self,
        member: "Population",
        placements: np.ndarray,
        value_s: np.ndarray,
        energy: np.ndarray,
    ) -> None:
        for k in range(len(placements)):
            worst = np.lexsort((member.energy, np.isinf(member.value_s)))[-1]
            if energy[k] < member.energy[worst] and energy[k] not in member.energy:
                member.placement[worst] = placements[k]
                member.value_s[worst], member.energy[worst] = value_s[k], energy[k]

    def share(self, members: Sequence["Population"]) -> None:
        best = min(members, key=lambda member: member.energy.min())
        k = int(np.argmin(best.energy))
        source = [
            part[k : k + 1].copy() for part in (best.placement, best.value_s, best.energy)
        ]
        for member in members:
            self.learn(member, *source)


@dataclasses.dataclass(frozen=True)
class RandomSearch:
    """Settings of random search: each task on any device that can run it; no starts."""

    members: int = 4
    starts: int = 12  # the best that are kept

    def fit(self, evaluations: int) -> Self:
        return dataclasses.replace(self, members=max(min(self.members, evaluations // 64), 1))

    def begin(self, problem: SearchProblem, starts: np.ndarray, seed: int) -> "Population":
        return make_population(problem, starts, seed)

    def run(
        self, problem: SearchProblem, member: "Population", steps: int, begin: float, end: float
    ) -> int:
        from doppler_jax.search.kernels import breed

        del begin, end
        return breed(problem.aim, member, steps, 0, 0.0, True, problem.target_s)

    best = Evolution.best

    def learn(self, member: "Population", *better: np.ndarray) -> None:
        del member, better

    def share(self, members: Sequence["Population"]) -> None:
        del members


def make_population(problem: SearchProblem, starts: np.ndarray, seed: int) -> "Population":
    """Returns placements `[P, N]` that are yet to be looked at, tasks in topological order."""
    from doppler_jax.search.kernels import GROUP, Population

    size = len(starts)
    order = np.argsort(problem.aim.rank).astype(np.uint32)
    return Population(
        random=np.array([seed], np.uint64),
        placement=starts.astype(np.uint32),
        order=np.tile(order, (size, 1)),
        energy=np.full(size, np.inf),
        value_s=np.full(size, np.inf),
        moved=np.zeros((2, GROUP), np.uint32),
        trial=problem.make_trial(order.copy(), order),
    )
