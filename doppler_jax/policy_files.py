"""Policies of every learned method as checkpoints, which Orbax alone can restore."""

import pathlib
from typing import Any

from doppler_jax.learners.registry import LEARNERS
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.checkpoint import Policy, read_policy, write_policy


def save_policy(
    path: str | pathlib.Path, policy: Policy, meta: dict[str, Any] | None = None
) -> None:
    """Writes a policy as a checkpoint: `params`, a plain tree, and `meta`, JSON.

    Args:
      path: a folder, made if there is none.
      policy: what to write.
      meta: what else to say of it, such as seeds and scores.

    Raises:
      ValueError: the folder holds a checkpoint already.
    """
    write_policy(path, policy, meta or {})


def load_policy(path: str | pathlib.Path) -> Policy:
    """Returns the policy of a checkpoint, of the newest one if `path` is a run's folder.

    Raises:
      ValueError: there is no checkpoint there, or one of another feature version, of an
        unknown method or with unknown settings.
    """
    params, meta = read_policy(path)
    method, settings = meta.get("method", "doppler"), dict(meta["policy"])
    if method in LEARNERS:
        kind: Any = type(LEARNERS[method])
        del settings["feature_version"]
    elif method.startswith("doppler"):
        kind = PolicyConfig
    else:
        raise ValueError(f"{path}: a policy of the unknown method {method!r}")
    try:
        return Policy(params=params, config=kind(**settings), method=method)
    except TypeError as error:
        raise ValueError(f"{path}: settings that {method!r} does not know: {error}") from error
