"""What an execution of a placement is, and how long it takes.

Read in this order:

- `disciplines`: which of its tasks a device starts next. A new queue discipline starts there.
- `oracle` (with `durations`): the rules in plain Python, which judge all the rest.
- `simulate`: the door for users.
- `native`, `native_kernels`: the same rules compiled by Numba, for CPUs; `memory_kernels`: and
  the rule of `memory`.
- `lockstep` (on `lanes`): the same rules in JAX, for accelerators and for use inside `jit`,
  with `batches` (`simulate_padded`) for a door.
- `validate`: is a schedule, simulated or measured, legal? `critical_chain`: why does it take so
  long? Both look at a schedule as `activities`.
- `noise`: random durations and orders; `memory`: what lies where; `finalists`: the best of
  several placements.
- `synchronous`: bulk-synchronous execution, the contrast.
"""

from doppler_jax.simulator.critical_chain import critical_chain
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.noise import Factors, draw_factors, makespan_statistics, random_ranks
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import SimulationResult
from doppler_jax.simulator.synchronous import simulate_synchronous
from doppler_jax.simulator.validate import validate
from doppler_jax.types import Schedule

__all__ = [
    "Factors",
    "Schedule",
    "SimulationResult",
    "critical_chain",
    "draw_factors",
    "makespan_s",
    "makespan_statistics",
    "peak_memory_bytes",
    "random_ranks",
    "simulate_oracle",
    "simulate_synchronous",
    "validate",
]
