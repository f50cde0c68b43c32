"""Named example functions of configurable size, to place, train on and measure."""

from doppler_jax.programs.workloads.registry import list_workloads, make_workload
from doppler_jax.programs.workloads.workload import Workload, make_arrays

__all__ = ["Workload", "list_workloads", "make_arrays", "make_workload"]
