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

from doppler_jax.policies.features import FEATURE_VERSION, NORMALISATION
from doppler_jax.training.state import StateT, TrainState
from doppler_jax.types import Policy

FORMAT = "doppler_jax.checkpoint"

STATE_VERSION = 4
"""Of what is in `train`; a run can be resumed from its own version alone."""


class Checkpoints:
    """The checkpoints in one folder, by number of updates; the newest two are kept.

    A checkpoint appears under its name only when it is complete, so a killed run leaves
    the one before.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self._args = ocp.args

    def latest(self) -> int | None:
        """Returns the number of updates of the newest checkpoint, None without any."""
        return self._manager.latest_step()

    def save(
        self, policy: Policy, meta: dict[str, Any], state: TrainState | None = None
    ) -> None:
        """Saves a policy, and the state that it is of, unless its update is saved already."""
        update = 0 if state is None else int(state.update)
        if update == self.latest():
            return
        header = {
            "format": FORMAT,
            "state_version": STATE_VERSION,
            "method": policy.method,
            "policy": {"feature_version": FEATURE_VERSION, **dataclasses.asdict(policy.config)},
            "normalisation": NORMALISATION,
        }
        standard, params = self._args.StandardSave, jax.tree.map(np.asarray, policy.params)
        items = {"params": standard(params), "meta": self._args.JsonSave({**meta, **header})}
        if state is not None:
            items["train"] = standard(_plain(state))
        self._manager.save(update, args=self._args.Composite(**items))

    def read(self, problem: str, update: int | None = None, **items: Any) -> Any:
        """Returns items of a checkpoint, by default the newest.

        Args:
          problem: what an error says.
          update: of the checkpoint.
          items: trees like those that are saved under these names, or None.

        Raises:
          ValueError: they are not there, or damaged; the message starts with the folder and
            the problem.
        """
        update = self.latest() if update is None else update
        json, standard = self._args.JsonRestore, self._args.StandardRestore
        wanted = {k: json() if k == "meta" else standard(like) for k, like in items.items()}
        try:
            return self._manager.restore(update, args=self._args.Composite(**wanted))
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            # Orbax and TensorStore append whole specifications; the start says what is wrong.
            raise ValueError(
                f"{self._manager.directory / str(update)}: {problem}: {str(error)[:200]}"
            ) from error

    def restore(self, like: StateT) -> StateT:
        """Returns the newest state; `like` gives structure and shapes.

        Raises:
          ValueError: there is no checkpoint, or it is not of such a state.
        """
        where = self._manager.directory
        version = self.meta().get("state_version", 1)
        if version != STATE_VERSION:
            raise ValueError(
                f"{where}: cannot resume: a state of version {version}, this library has "
                f"version {STATE_VERSION}; its policy can be loaded"
            )
        params, train = jax.tree.map(np.asarray, like.params), _plain(like)
        found = self.read("cannot resume", params=params, train=train)
        wanted = dataclasses.replace(train, params=params)
        state = dataclasses.replace(found["train"], params=found["params"])
        if jax.tree.map(np.shape, state) != jax.tree.map(np.shape, wanted):
            raise ValueError(f"{where}: cannot resume: other shapes there")
        return jax.tree.map(_restored, like, state)

    def meta(self) -> dict[str, Any]:
        """Returns what was saved beside the newest state."""
        return dict(self.read("cannot resume", meta=None)["meta"])

    def close(self) -> None:
        """Releases the manager."""
        self._manager.close()


def _plain(state: StateT) -> StateT:
    """Returns a state but for its parameters as Orbax saves it, in NumPy arrays.

    It does not save what is empty, for lack of elites or chains: None stands for that.
    """

    def plain(leaf: Any) -> np.ndarray | None:
        leaf = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        return np.asarray(leaf) if leaf.size else None

    return jax.tree.map(plain, dataclasses.replace(state, params=None))


def _restored(like: Any, found: np.ndarray | None) -> Any:
    """Returns a leaf as it was before `_plain`."""
    if found is None:
        return like
    return jax.random.wrap_key_data(jnp.asarray(found)) if _is_key(like) else jnp.asarray(found)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
