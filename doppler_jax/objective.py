"""What a placement is judged by: the links, and the noise and its statistic."""

import dataclasses
import math
from typing import Literal

import numpy as np

LINKS = ("parallel", "serial", "duplex")
"""How links carry transfers.

`parallel`: without contention. `serial`: one at a time per ordered pair of devices. `duplex`:
a device sends one at a time and receives one at a time.
"""


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised: how placements are executed and compared. Static under `jit`.

    Under links `duplex` training is guided by `serial` links; the oracle judges.

    Without noise draws it is the makespan under queue `fifo`. With them it is the mean over
    the draws, or the quantile if one is given; all placements share the draws.
    """

    links: str = "parallel"
    """How links carry transfers: `parallel`, `serial` or `duplex`."""
    num_noise: int = 0
    """Draws of noise under which placements are compared; 0 for none."""
    noise_sigma: float = 0.1
    """Log-standard-deviation of every compute and transfer duration under noise."""
    quantile: float | None = None
    """Of the draws, 0 to 1, to be minimised; their mean if not given."""

    def __post_init__(self) -> None:
        if self.links not in LINKS:
            raise ValueError(f"unknown links {self.links!r}; known: {', '.join(LINKS)}")
        if self.num_noise < 0:
            raise ValueError(f"num_noise is {self.num_noise}; expected 0 or more")
        if not 0 <= self.noise_sigma < math.inf:
            raise ValueError(f"noise_sigma is {self.noise_sigma}; expected 0 or more")
        if self.quantile is not None and not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile is {self.quantile}; expected 0 to 1")
        if self.quantile is not None and not self.num_noise:
            raise ValueError("a quantile needs noise: give num_noise too")

    @property
    def guide_links(self) -> Literal["parallel", "serial"]:
        """Links under which training compares placements."""
        return "parallel" if self.links == "parallel" else "serial"

    def statistic(self, makespan_s: np.ndarray) -> np.ndarray:
        """Returns what is minimised of makespans `[B]`, or under noise `[K, B]`, seconds."""
        if not self.num_noise:
            return makespan_s
        if self.quantile is None:
            return makespan_s.mean(axis=0)
        return np.quantile(makespan_s, self.quantile, axis=0)

    @property
    def simulations(self) -> int:
        """Executions that judging one placement takes: its evaluations in a budget."""
        return max(self.num_noise, 1)
