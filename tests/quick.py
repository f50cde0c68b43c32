"""For what compiles much and runs little: half the compilation, the same results."""

import functools
import os

import jax

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

QUICK_ENVIRONMENT = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
"""Of a command in a process of its own."""
