"""Settings of the training commands; every field is an option of the same name."""

import dataclasses
import math
import pathlib
from typing import Any

from doppler_jax import cli
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.problems import ProblemSettings
from doppler_jax.training.imitation import ImitationConfig
from doppler_jax.training.sim_rl import SimConfig, check_sim_config
from doppler_jax.training.system_rl import SystemConfig

MAY_BE_ZERO = ("updates", "num_elites", "num_chains", "search_rounds")
"""Ends of the names of counts that may be 0."""


@dataclasses.dataclass(frozen=True)
class StageSettings(ProblemSettings):
    """What the stage commands share."""

    host_devices: int = 2
    """Devices that the CPU is split into, where there is no accelerator."""
    seed: int = 0
    runs: pathlib.Path = pathlib.Path("runs")
    """Folder of all runs; a stage finds the one before here."""
    save_every_s: float = 10.0
    """Seconds between checkpoints."""


@dataclasses.dataclass(frozen=True)
class Stage1Settings(StageSettings):
    """Stage 1: imitate critical-path list scheduling."""

    num_updates: int = 200
    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    training: ImitationConfig = dataclasses.field(default_factory=ImitationConfig)


@dataclasses.dataclass(frozen=True)
class Stage2Settings(StageSettings):
    """Stage 2: policy gradient in the simulator, from stage 1's policy."""

    num_updates: int = 500
    episodes: int | None = None
    """Episodes after which no update starts."""
    budget_s: float | None = None
    """Seconds after which no update starts; those before the run was resumed count."""
    target_s: float | None = None
    """Makespan at which training ends."""
    training: SimConfig = dataclasses.field(default_factory=SimConfig)


@dataclasses.dataclass(frozen=True)
class Stage3Settings(StageSettings):
    """Stage 3: policy gradient on times measured here, from stage 2's policy."""

    measured_preset: str = "small"
    """Sizes of the workload while it is measured; the policy fits any."""
    backend: str = "auto"
    """What measures: "local" is this process, a launcher's name ("ray") a process per core;
    "auto" is ray where there is no accelerator and Ray is installed, else local."""
    max_slowdown: float = 2.0
    """A placement this many times as slow as the best is not run again."""
    num_updates: int = 20
    training: SystemConfig = dataclasses.field(default_factory=SystemConfig)


def check_settings(settings: Any, prefix: str = "--") -> None:
    """Checks the numbers of a settings dataclass, nested ones included.

    Raises:
      ValueError: a count is below 1 (those in `MAY_BE_ZERO` below 0), another number is
        negative or not finite, or the seed is invalid; the message names the option. Or the
        counts of stage 2 do not fit together.
    """
    for field in dataclasses.fields(settings):
        name, value = field.name, getattr(settings, field.name)
        option = prefix + name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            check_settings(value, f"{option}.")
            if isinstance(value, SimConfig):
                check_sim_config(value)
        elif name == "seed":
            cli.check_seed(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            least = 0 if name.endswith(MAY_BE_ZERO) else 1
            if value < least:
                raise ValueError(f"{option} is {value}; expected at least {least}")
        elif isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{option} is {value}; expected a finite number >= 0")
