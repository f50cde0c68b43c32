"""Stage 3: policy gradient on measured times; few, precious episodes."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.files import parse_json_object
from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import Problem
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.rollout import Episode
from doppler_jax.training.reinforce import learn
from doppler_jax.training.state import TrainState, keep_best

Measure = Callable[[np.ndarray], float]
"""Seconds that a placement `[N]` takes on the real devices."""


@dataclasses.dataclass(frozen=True)
class SystemConfig:
    """Settings of stage 3."""

    batch: int = 8  # episodes per update, each of which is measured
    learning_rate: float = 1e-3
    entropy_weight: float = 1e-2  # at the start; halves every `entropy_halving` updates
    entropy_halving: int = 20
    num_elites: int = 4
    elite_weight: float = 0.5  # of their imitation beside the policy gradient


class MeasurementLog:
    """Every measurement of a run, one JSON line each, written before it is used.

    A resumed run takes from here what was measured before it was stopped, so that it goes
    on exactly as it would have.
    """

    def __init__(self, path: pathlib.Path, measure: Measure) -> None:
        """Reads the log, dropping a line that was cut off while being written."""
        self._path = path
        self._measure = measure
        self._known: dict[tuple[int, int], tuple[list[int], float]] = {}
        if path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            os.truncate(path, len(whole.encode()))
            for line in whole.splitlines():
                entry = parse_json_object(path, line)
                key = (entry["update"], entry["episode"])
                self._known[key] = (entry["placement"], entry["seconds"])

    def seconds(self, update: int, episode: int, placement: np.ndarray) -> float:
        """Returns what the placement `[N]` took, measuring it unless the log knows.

        Raises:
          ValueError: the log has another placement there, so it is another run's; or the
        measured time is not finite.
        """
        wanted = [int(device) for device in placement]
        if (update, episode) in self._known:
            logged, seconds = self._known[update, episode]
            if logged != wanted:
                raise ValueError(
                    f"{self._path}: update {update}, episode {episode} measured another "
                    "placement than this run asks for; it is the log of another run"
                )
            return seconds
        seconds = float(self._measure(placement))
        if not np.isfinite(seconds):
            raise ValueError(f"update {update}, episode {episode}: measured {seconds} s")
        entry = {"update": update, "episode": episode, "placement": wanted, "seconds": seconds}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._known[update, episode] = (wanted, seconds)
        return seconds


def set_incumbent(
    state: TrainState, problem: Problem, placement: np.ndarray, log: MeasurementLog
) -> TrainState:
    """Returns the state with the placement `[N]` to beat, measured as update 0, episode -1."""
    padded = np.zeros(problem.instance.padded_tasks, np.int32)
    padded[: len(placement)] = placement
    seconds = jnp.float32(log.seconds(0, -1, placement))
    return keep_best(state, jnp.asarray(padded)[None], seconds[None])


def system_update(
    state: TrainState,
    problem: Problem,
    policy: PolicyConfig,
    config: SystemConfig,
    log: MeasurementLog,
) -> tuple[TrainState, dict[str, chex.Array]]:
    """Does one update of stage 3: samples episodes, measures each, learns from the times."""
    episodes = _sample(state, problem, policy, config)
    num_tasks = int(problem.instance.num_tasks)
    update = int(state.update)
    placements = np.asarray(episodes.placement)[:, :num_tasks]
    seconds = [log.seconds(update, i, placement) for i, placement in enumerate(placements)]
    measured_s = jnp.asarray(seconds, jnp.float32)
    return _learn(state, problem, episodes, measured_s, policy, config)


def confirm(
    log: MeasurementLog, update: int, placements: Sequence[np.ndarray], rounds: int = 5
) -> tuple[np.ndarray, float]:
    """Returns the best of some placements `[N]` and its median, measured in turn again.

    The shortest of many noisy times flatters, so that finalists are measured afresh, in
    turn so that drift hits all alike. The first is kept unless another's median is less.
    """
    seconds = np.array(
        [
            [
                log.seconds(update, -2 - turn * len(placements) - i, placement)
                for i, placement in enumerate(placements)
            ]
            for turn in range(rounds)
        ]
    )
    medians = np.median(seconds, axis=0)
    best = int(np.argmin(medians))
    return placements[best], float(medians[best])


@partial(jax.jit, static_argnames=("policy", "config"))
def _sample(
    state: TrainState, problem: Problem, policy: PolicyConfig, config: SystemConfig
) -> Episode:
    keys = jax.random.split(jax.random.fold_in(state.key, state.update), config.batch)
    tables = model.apply(state.params, policy, problem)
    return jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, problem, tables)


@partial(jax.jit, static_argnames=("policy", "config"))
def _learn(
    state: TrainState,
    problem: Problem,
    episodes: Episode,
    measured_s: chex.Array,
    policy: PolicyConfig,
    config: SystemConfig,
) -> tuple[TrainState, dict[str, chex.Array]]:
    state, loss = learn(state, problem, episodes, measured_s, policy, config)
    metrics = {
        "loss": loss,
        "measured_mean_s": measured_s.mean(),
        "measured_min_s": measured_s.min(),
        "best_measured_s": state.best_makespan_s,
    }
    return state, metrics
