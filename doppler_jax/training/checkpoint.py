"""Orbax checkpoints: `params`, a plain tree for anyone; `train`, the rest; `meta`, JSON.

Leaves are saved as NumPy arrays, so that they restore on any number of devices without
a template.
"""

import dataclasses
import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from doppler_jax.policies.features import FEATURE_VERSION, NORMALISATION
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.state import Elites, TrainState

FORMAT = "doppler_jax.checkpoint"

STATE_VERSION = 2
"""Of what `train` holds; a run can be resumed from its own version alone."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """A trained policy: parameters as a plain tree, and what it takes to use them."""

    params: chex.ArrayTree
    config: Any  # `PolicyConfig`, or the settings of another learned method
    method: str = "doppler"  # of `place`, whose policy it is


class Checkpoints:
    """The checkpoints of one run, by number of updates; the newest two are kept.

    A checkpoint appears under its name only when it is complete, so a killed run leaves
    the one before.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        """Returns the number of updates of the newest checkpoint, None without any."""
        return self._manager.latest_step()

    def save(self, state: TrainState, policy: PolicyConfig, meta: dict[str, Any]) -> None:
        """Saves a state, unless its number of updates is saved already."""
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

    def restore(self, like: TrainState) -> TrainState:
        """Returns the newest state; `like` gives structure and shapes.

        Raises:
          ValueError: there is no checkpoint, or it is not of such a state.
        """
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
        state = _join(found["params"], found["train"], like)
        if jax.tree.map(jnp.shape, state) != jax.tree.map(jnp.shape, like):
            raise ValueError(f"{self._manager.directory}: cannot resume: other shapes there")
        return state

    def meta(self) -> dict[str, Any]:
        """Returns what was saved beside the newest state."""
        restore = ocp.args.Composite(meta=ocp.args.JsonRestore())
        try:
            return dict(self._manager.restore(self.latest(), args=restore)["meta"])
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._manager.directory}: cannot resume: {error}") from error

    def close(self) -> None:
        """Releases what the manager holds."""
        self._manager.close()


def read_policy(path: str | pathlib.Path) -> tuple[chex.ArrayTree, dict[str, Any]]:
    """Returns parameters and `meta` of a checkpoint, of the newest one in a run's folder.

    Raises:
      ValueError: there is no checkpoint there, or it has another feature version.
    """
    folder = _find(pathlib.Path(path))
    with ocp.CheckpointManager(folder.parent.absolute()) as manager:
        meta = _load(manager, folder, "meta", ocp.args.JsonRestore())
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError(f"{folder}: not a checkpoint of this project")
        version = meta.get("policy", {}).get("feature_version")
        if version != FEATURE_VERSION:
            raise ValueError(
                f"{folder}: feature version {version}, this library computes {FEATURE_VERSION}"
            )
        params = _load(manager, folder, "params", ocp.args.StandardRestore())
    return params, meta


def write_policy(path: str | pathlib.Path, policy: Policy, meta: dict[str, Any]) -> None:
    """Writes a policy as a checkpoint in a folder, with `meta`, JSON, beside what it is.

    Raises:
      ValueError: there is a checkpoint already.
    """
    folder = pathlib.Path(path)
    header = {
        "format": FORMAT,
        "method": policy.method,
        # DOPPLER's own settings hold the version already.
        "policy": {"feature_version": FEATURE_VERSION, **dataclasses.asdict(policy.config)},
        "normalisation": NORMALISATION,
    }
    with ocp.CheckpointManager(folder.absolute()) as manager:
        if manager.all_steps():
            raise ValueError(f"{folder}: holds a checkpoint already")
        manager.save(
            0,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(jax.tree.map(np.asarray, policy.params)),
                meta=ocp.args.JsonSave({**meta, **header}),
            ),
        )


def _load(
    manager: ocp.CheckpointManager,
    folder: pathlib.Path,
    item: str,
    how: ocp.args.CheckpointArgs,
) -> Any:
    """Returns one item of the checkpoint in `folder`, or raises a `ValueError`."""
    try:
        return manager.restore(int(folder.name), args=ocp.args.Composite(**{item: how}))[item]
    except (FileNotFoundError, ValueError, KeyError) as error:
        # Orbax and TensorStore append whole specifications; the start says what is wrong.
        raise ValueError(
            f"{folder}: not a checkpoint, or a damaged one: {str(error)[:200]}"
        ) from error


def _find(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder of one checkpoint at or below `path`."""
    for folder in (path, path / "checkpoints"):
        if (folder / "params").is_dir() and folder.name.isdigit():
            return folder
        if folder.is_dir():
            steps = [child for child in folder.iterdir() if child.name.isdigit()]
            if steps:
                return max(steps, key=lambda child: int(child.name))
    raise ValueError(f"{path}: no checkpoint here; expected a run's folder or a checkpoint")


def _split(state: TrainState) -> tuple[Any, dict[str, Any]]:
    """Returns parameters and the rest, by field, as NumPy arrays.

    What is empty, for lack of elites or chains, is left out: Orbax does not save it.
    """
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    fields["key"] = jax.random.key_data(state.key)
    elites = fields.pop("elites")
    fields["elite_placement"], fields["elite_makespan_s"] = elites.placement, elites.makespan_s
    fields = jax.tree.map(np.asarray, fields)
    params = fields.pop("params")
    full = {k: v for k, v in fields.items() if all(leaf.size for leaf in jax.tree.leaves(v))}
    return params, full


def _join(params: Any, train: dict[str, Any], like: TrainState) -> TrainState:
    """Returns the state of such parts; `like` has what is empty."""
    fields = jax.tree.map(jnp.asarray, {**train, "params": params})
    fields["key"] = jax.random.wrap_key_data(fields["key"])
    elites = Elites(
        placement=fields.pop("elite_placement", like.elites.placement),
        makespan_s=fields.pop("elite_makespan_s", like.elites.makespan_s),
    )
    return dataclasses.replace(like, elites=elites, **fields)
