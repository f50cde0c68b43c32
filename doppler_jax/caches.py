"""What is kept between processes, in the user's cache folder, unless that is switched off."""

import os
import pathlib

VARIABLE = "DOPPLER_JAX_CACHE"
"""Environment variable: the folder in place of the user's; `off` keeps nothing."""


def user_folder() -> pathlib.Path | None:
    """Returns the folder, which may not exist yet; None: nothing is to be kept."""
    told = os.environ.get(VARIABLE, "")
    if told.lower() == "off":
        return None
    return pathlib.Path(told).expanduser() if told else default_folder()


def default_folder() -> pathlib.Path:
    """Returns the folder where no other is named."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return home.expanduser() / "doppler_jax"


def keep_compiled_programs() -> None:
    """Lets JAX keep on disk what it compiles in this process.

    A folder that JAX has been given already, as by `JAX_COMPILATION_CACHE_DIR`, stays.
    """
    folder = user_folder()
    if folder is None:
        return
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
