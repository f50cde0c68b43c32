"""From a JAX function to a sharded program: trace, partition, and example workloads."""

from doppler_jax.programs.evaluate import evaluate
from doppler_jax.programs.partition import partition
from doppler_jax.programs.program import Program
from doppler_jax.programs.trace import trace
from doppler_jax.programs.workloads import (
    Workload,
    list_workloads,
    make_arrays,
    make_workload,
)

__all__ = [
    "Program",
    "Workload",
    "evaluate",
    "list_workloads",
    "make_arrays",
    "make_workload",
    "partition",
    "trace",
]
