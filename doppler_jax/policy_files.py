"""Policies on disk: checkpoints of every learned method, and the one that ships.

A checkpoint has `params`, a plain tree that Orbax alone can restore, and `meta`, JSON.
"""

import contextlib
import pathlib
from functools import cache, partial
from typing import Any

import chex

from doppler_jax.learners.registry import POLICY_SETTINGS
from doppler_jax.policies.features import FEATURE_VERSION
from doppler_jax.training.checkpoint import FORMAT, Checkpoints
from doppler_jax.types import Policy

_PACKAGE = pathlib.Path(__file__).resolve().parent

FOLDERS = (_PACKAGE.parent / "checkpoints" / "base", _PACKAGE / "base")
"""Where the base policy lies: in a checkout, in an installation."""


@cache
def load_base_policy() -> Policy | None:
    """Returns the policy that ships, trained on many graphs and clusters; None without one.

    Raises:
      ValueError: the first of `FOLDERS` that there is holds no checkpoint, or one of another
        feature version.
    """
    found = next((path for path in FOLDERS if path.is_dir()), None)
    return None if found is None else load_policy(found)


def load_policy(path: str | pathlib.Path) -> Policy:
    """Returns the policy of a checkpoint, of the newest one if `path` is a run's folder.

    Example:
      >>> policy = dj.load_policy("checkpoints/base")
      >>> policy.method
      'doppler'

    Raises:
      ValueError: there is no checkpoint there, or one of another feature version, of an
        unknown method or with unknown settings.
    """
    params, meta = read_policy(path)
    method, settings = meta.get("method", "doppler"), dict(meta["policy"])
    if method not in POLICY_SETTINGS:
        raise ValueError(f"{path}: a policy of the unknown method {method!r}")
    if method != "doppler":  # whose own settings have the version
        del settings["feature_version"]
    try:
        config = POLICY_SETTINGS[method](**settings)
    except TypeError as error:
        raise ValueError(f"{path}: settings that {method!r} does not know: {error}") from error
    return Policy(params=params, config=config, method=method)


def save_policy(
    path: str | pathlib.Path, policy: Policy, meta: dict[str, Any] | None = None
) -> None:
    """Writes a policy as a checkpoint.

    Args:
      path: a folder, made if there is none.
      policy: what to write.
      meta: what else to say of it, such as seeds and scores.

    Raises:
      ValueError: the folder has a checkpoint already.
    """
    folder = pathlib.Path(path)
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        if checkpoints.latest() is not None:
            raise ValueError(f"{folder}: holds a checkpoint already")
        checkpoints.save(policy, meta or {})


def read_policy(path: str | pathlib.Path) -> tuple[chex.ArrayTree, dict[str, Any]]:
    """Returns parameters and `meta` of a checkpoint, of the newest one in a run's folder.

    Raises:
      ValueError: there is no checkpoint there, or it has another feature version.
    """
    folder = _find(pathlib.Path(path))
    with contextlib.closing(Checkpoints(folder.parent)) as checkpoints:
        read = partial(checkpoints.read, "not a checkpoint, or a damaged one", int(folder.name))
        meta = read(meta=None)["meta"]
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError(f"{folder}: not a checkpoint of this project")
        version = meta.get("policy", {}).get("feature_version")
        if version != FEATURE_VERSION:
            raise ValueError(
                f"{folder}: feature version {version}, this library computes {FEATURE_VERSION}"
            )
        return read(params=None)["params"], meta


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
