"""Compiled kernels on disk, through JAX's persistent compilation cache."""

import os
import pathlib

import jax
from jax.experimental.compilation_cache import compilation_cache


def cache_compilations(folder: str | os.PathLike[str]) -> None:
    """Lets this process keep what it compiles in a folder, and take it from there.

    A later process that does likewise compiles nothing that is there already. It concerns
    every compilation of JAX from now on, also of small kernels, which JAX by itself does
    not keep, and of the processes that `ray_devices` starts afterwards. On CPU, give each
    kind of machine a folder of its own: machine code of one need not run on another. What
    is in the folder is run, so nobody else should be able to write there.

    Args:
      folder: made if absent.

    Raises:
      ValueError: the folder cannot be made.
    """
    path = pathlib.Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot keep compilations in {path}: {error}") from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # else a folder that is in use stays so
