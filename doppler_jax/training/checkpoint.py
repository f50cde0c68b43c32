"""Orbax checkpoints: `params`, a plain tree for anyone; `train`, the rest; `meta`, JSON.

Leaves are saved as NumPy arrays, so that they restore on any number of devices without
a template.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.policies.features import NORMALISATION
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.state import StateT, TrainState

FORMAT = "doppler_jax.checkpoint"

STATE_VERSION = 3
"""Of what is in `train`; a run can be resumed from its own version alone."""


class Checkpoints:
    """The checkpoints of one run, by number of updates; the newest two are kept.

    A checkpoint appears under its name only when it is complete, so a killed run leaves
    the one before.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """Returns the number of updates of the newest checkpoint, None without any."""
        return self._manager.latest_step()

    def save(self, state: TrainState, policy: PolicyConfig, meta: dict[str, Any]) -> None:
        """Saves a state, unless its number of updates is saved already."""
        import orbax.checkpoint as ocp

        params, train = _split(state)
        header = {
            "format": FORMAT,
            "state_version": STATE_VERSION,
            "policy": dataclasses.asdict(policy),
            "normalisation": NORMALISATION,
        }
        if int(state.update) == self.latest():
            return
        self._manager.save(
            int(state.update),
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                train=ocp.args.StandardSave(train),
                meta=ocp.args.JsonSave({**meta, **header}),
            ),
        )

    def restore(self, like: StateT) -> StateT:
        """Returns the newest state; `like` gives structure and shapes.

        Raises:
          ValueError: there is no checkpoint, or it is not of such a state.
        """
        import orbax.checkpoint as ocp

        version = self.meta().get("state_version", 1)
        if version != STATE_VERSION:
            raise ValueError(
                f"{self._manager.directory}: cannot resume: a state of version {version}, this "
                f"library has version {STATE_VERSION}; its policy can be loaded"
            )
        params, train = _split(like)
        try:
            found = self._manager.restore(
                self.latest(),
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(params),
                    train=ocp.args.StandardRestore(train),
                ),
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._manager.directory}: cannot resume: {error}") from error
        state: StateT = _join({**found["train"], "params": found["params"]}, like)
        if jax.tree.map(jnp.shape, state) != jax.tree.map(jnp.shape, like):
            raise ValueError(f"{self._manager.directory}: cannot resume: other shapes there")
        return state

    def meta(self) -> dict[str, Any]:
        """Returns what was saved beside the newest state."""
        import orbax.checkpoint as ocp

        restore = ocp.args.Composite(meta=ocp.args.JsonRestore())
        try:
            return dict(self._manager.restore(self.latest(), args=restore)["meta"])
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._manager.directory}: cannot resume: {error}") from error

    def close(self) -> None:
        """Releases the manager."""
        self._manager.close()


def _split(state: TrainState) -> tuple[Any, dict[str, Any]]:
    """Returns parameters and the rest, by field, as NumPy arrays."""
    train = _by_field(state)
    return train.pop("params"), train


def _by_field(part: Any) -> dict[str, Any]:
    """Returns a dataclass as dictionaries of NumPy arrays.

    What is empty, for lack of elites or chains, is left out: Orbax does not save it.
    """
    fields = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            value = _by_field(value)
        elif field.name == "key":
            value = np.asarray(jax.random.key_data(value))
        else:
            value = jax.tree.map(np.asarray, value)
        if all(leaf.size for leaf in jax.tree.leaves(value)):
            fields[field.name] = value
    return fields


def _join(found: dict[str, Any], like: Any) -> Any:
    """Returns the state of such fields; `like` has what is empty."""
    fields = {}
    for name, value in found.items():
        if dataclasses.is_dataclass(getattr(like, name)):
            fields[name] = _join(value, getattr(like, name))
        else:
            fields[name] = jax.tree.map(jnp.asarray, value)
    if "key" in fields:
        fields["key"] = jax.random.wrap_key_data(fields["key"])
    return dataclasses.replace(like, **fields)
