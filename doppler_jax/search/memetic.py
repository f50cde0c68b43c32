"""A memetic search (Moscato 1989): evolution until it stalls, then iterated local search.

Evolution gains most while simulations are few for the size of the graph; once its
population has no news, descents from its best find what is left. The local search is not
applied to every child, as it is in most memetic algorithms: a descent takes thousands of
simulations here.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from doppler_jax.search.populations import Evolution
from doppler_jax.search.problem import SearchProblem
from doppler_jax.search.walks import LocalSearch

if TYPE_CHECKING:
    from doppler_jax.search.kernels import Population, Walker


@dataclasses.dataclass
class MemeticMember:
    """A population, and once it has stalled the walker that began at its best."""

    population: "Population"
    seed: int
    in_vain: int = 0  # steps since the population's best improved
    walker: "Walker | None" = None


@dataclasses.dataclass(frozen=True)
class Memetic:
    """Settings of the two searches."""

    evolution: Evolution = dataclasses.field(default_factory=Evolution)
    descent: LocalSearch = dataclasses.field(default_factory=LocalSearch)
    patience: int = 4096  # steps in vain after which evolution ends

    @property
    def members(self) -> int:
        return self.evolution.members

    @property
    def starts(self) -> int:
        return self.evolution.starts

    def fit(self, evaluations: int) -> Self:
        return dataclasses.replace(self, evolution=self.evolution.fit(evaluations))

    def begin(self, problem: SearchProblem, starts: np.ndarray, seed: int) -> MemeticMember:
        return MemeticMember(self.evolution.begin(problem, starts, seed), seed)

    def run(
        self,
        problem: SearchProblem,
        member: MemeticMember,
        steps: int,
        begin: float,
        end: float,
    ) -> int:
        if member.walker is not None:
            return self.descent.run(problem, member.walker, steps, begin, end)
        before_s = member.population.energy.min()
        made = self.evolution.run(problem, member.population, steps, begin, end)
        is_gain = member.population.energy.min() < before_s
        member.in_vain = 0 if is_gain else member.in_vain + steps
        if member.in_vain >= self.patience:
            best = member.population.energy.argmin()
            start = member.population.placement[best : best + 1]
            member.walker = self.descent.begin(problem, start, member.seed)
        return made

    def best(self, member: MemeticMember) -> tuple[np.ndarray, np.ndarray]:
        placement, value_s = self.evolution.best(member.population)
        if member.walker is None:
            return placement, value_s
        found, found_s = self.descent.best(member.walker)
        return np.concatenate([found, placement]), np.concatenate([found_s, value_s])

    def learn(self, member: MemeticMember, *better: np.ndarray) -> None:
        if member.walker is None:
            self.evolution.learn(member.population, *better)
        else:
            self.descent.learn(member.walker, *better)

    def share(self, members: Sequence[MemeticMember]) -> None:
        walkers = [member.walker for member in members if member.walker is not None]
        if len(walkers) == len(members):
            self.descent.share(walkers)
        elif not walkers:
            self.evolution.share([member.population for member in members])
