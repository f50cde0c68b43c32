"""Trains the base policy, one for many graphs and clusters: `make pretrain`."""

import dataclasses
import pathlib
import time

import jax

from doppler_jax import cli
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.problems import use_host_devices
from doppler_jax.training.settings import check_settings
from experiments.pretraining import Pretraining


@dataclasses.dataclass(frozen=True)
class PretrainSettings:
    """Pretraining: one policy for many graphs and clusters."""

    budget_s: float = 4500.0
    """Seconds of training, those before the run was resumed counted; preparing is extra."""
    buckets: tuple[str, ...] = ("64x8", "128x4", "128x8", "256x4", "128x16")
    """Tasks x devices to train on; others are 256x8, 1024x8, and 128x4s with serial links."""
    problems: int = 1500
    """Problems of each bucket."""
    held_out: int = 20
    """Problems of each bucket that only measure, half of them of families never trained on."""
    searches: int = 30
    """Searches of 672 simulations for the best known placement of every held-out problem."""
    group: int = 8
    """Problems of an update."""
    batch: int = 16
    """Episodes of each."""
    learning_rate: float = 1e-3
    """At the start; it falls to a twentieth."""
    entropy: float = 1e-2
    """Weight of the entropy at the start, beside the policy gradient's 1; it falls to 0."""
    validate_every_s: float = 300.0
    """Seconds between measurements of the held-out problems."""
    host_devices: int = 2
    """Devices that the CPU is split into; an update's problems are cut over them."""
    seed: int = 0
    initial: pathlib.Path | None = None
    """A policy of these sizes to go on from, in place of a list scheduler."""
    run: pathlib.Path = pathlib.Path("runs/pretrain")
    """Folder of the run; what ships is in its `base`."""
    policy: PolicyConfig = dataclasses.field(
        default_factory=lambda: PolicyConfig(width=48, rounds=4, features="general")
    )


def main(settings: PretrainSettings) -> None:
    """Trains until the budget is spent and says how good the policy is."""
    check_settings(settings)
    use_host_devices(settings.host_devices)
    training = Pretraining(settings, settings.run)
    training.prepare()
    began, before_s = time.monotonic(), training.seconds
    print(training.validate(), flush=True)
    validated_s = training.seconds
    while training.seconds < settings.budget_s:
        training.update()
        training.seconds = before_s + time.monotonic() - began
        if training.seconds - validated_s >= settings.validate_every_s:
            validated_s = training.seconds
            print(training.validate(), flush=True)
            training.save()
    print(training.validate())
    training.save()
    print(f"base policy in {training.export()}")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", False)
    cli.run(main, PretrainSettings, "Pretrains the base policy.")
