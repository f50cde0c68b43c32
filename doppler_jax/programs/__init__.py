"""From a JAX function to a sharded program: trace, partition, and example workloads.

In the order of the work, which is the order to read in:

* `program`: what `trace` makes, a flat list of equations.
* `trace`: a JAX function to a program; `provenance` knows the user's line of everything.
* `rules/`: how each JAX primitive acts on blocks. A rule for another primitive goes there.
* `fuse`: equations to groups, the units that are cut.
* `grids`: counts of blocks; the uniform strategy, and counts given by name.
* `planner`: the choice of counts. `cut_costs` is its cost model, `elimination` its solver.
* `partition`: groups and counts to tasks; `task_kernels` is what the tasks compute.
* `blocks`: arguments into blocks, blocks into outputs. The engine needs both.
* `evaluate`: the tasks one after another. It says what a sharded program means.
* `explain`: for people, what a program was cut into.
* `workloads/`: named functions to try all this on.
"""

from doppler_jax.programs.explain import Explanation
from doppler_jax.types import ShardedProgram

__all__ = [
    "Explanation",
    "ShardedProgram",
]
