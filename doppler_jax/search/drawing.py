"""Random search: each task on any device that can run it."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from doppler_jax.baselines.simple import random_placements
from doppler_jax.search.anytime import NUM_FOUND
from doppler_jax.search.problem import SearchProblem


@dataclasses.dataclass
class Drawn:
    """The best placements that were drawn at once."""

    rng: np.random.Generator
    placements: np.ndarray  # [K, N] best first
    value_s: np.ndarray  # [K]


@dataclasses.dataclass(frozen=True)
class RandomSearch:
    """Scores many placements at a time, in threads; it has no use for starts."""

    queue: ClassVar[str | None] = "fifo"
    members: int = 1

    def fit(self, evaluations: int) -> Self:
        del evaluations
        return self

    def begin(
        self, problem: SearchProblem, placement: np.ndarray, rank: np.ndarray, seed: int
    ) -> Drawn:
        del problem, rank
        return Drawn(np.random.default_rng(seed), placement[None][:0], np.empty(0))

    def run(
        self, problem: SearchProblem, member: Drawn, steps: int, begin: float, end: float
    ) -> int:
        del begin, end
        drawn = random_placements(problem.costs, member.rng, steps)
        value_s, _ = problem.score(problem.ordered(drawn))
        best = np.argsort(value_s, kind="stable")[:NUM_FOUND]
        member.placements, member.value_s = drawn[best], value_s[best]
        return steps

    def best(
        self, problem: SearchProblem, member: Drawn
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        del problem
        return member.placements, member.value_s, np.zeros(member.placements.shape)

    def learn(
        self, member: Drawn, placement: np.ndarray, rank: np.ndarray, energy: float
    ) -> None:
        del member, placement, rank, energy

    def share(self, members: Sequence[Drawn]) -> None:
        del members
