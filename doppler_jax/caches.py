"""What JAX compiles for us is kept between processes, unless that is switched off."""

import os

import jax

from doppler_jax.native import cache_folder

VARIABLE = "DOPPLER_JAX_CACHE"
"""Environment variable: `off` keeps nothing of what JAX compiles."""


def keep_compiled_programs() -> None:
    """Lets JAX keep on disk what it compiles in this process, beside our compiled code.

    A folder that JAX has been given already, as by `JAX_COMPILATION_CACHE_DIR`, stays.
    """
    if os.environ.get(VARIABLE, "").lower() == "off":
        return
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder().parent / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
