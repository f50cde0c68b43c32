"""The policy that ships with the project: trained on many graphs and clusters, for any."""

import functools
import pathlib

from doppler_jax.policy_files import load_policy
from doppler_jax.training.checkpoint import Policy

_PACKAGE = pathlib.Path(__file__).resolve().parent

FOLDERS = (_PACKAGE.parent / "checkpoints" / "base", _PACKAGE / "base")
"""Where it lies: in a checkout, in an installation."""


@functools.cache
def load_base_policy(folder: pathlib.Path | None = None) -> Policy | None:
    """Returns the base policy, None where none ships; loaded once per process.

    Args:
      folder: where its checkpoint lies, by default the first of `FOLDERS` that there is.

    Raises:
      ValueError: what lies there is no checkpoint, or has another feature version.
    """
    folders = FOLDERS if folder is None else (folder,)
    found = next((path for path in folders if path.is_dir()), None)
    return None if found is None else load_policy(found)
