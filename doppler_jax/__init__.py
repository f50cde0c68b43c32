"""Learned placement of JAX programs on devices: trace, partition, cost, place, simulate, run.

Beside the packages, from below: `types.py` is the data that all share, `files.py` reads and
writes text and JSON; `objective.py` says what a placement is judged by, `budget.py` what a
search or a training may spend. `problems.py` makes a graph and costs of what a command line
names, `policy_files.py` keeps policies. `placing.py` is `place`, `placed.py` what it returns,
and `__main__.py` the command line, with what all command lines share in `cli.py`.
`native.py` is how Numba compiles code, `caches.py` where JAX keeps its own; `memory_maps.py`
keeps a process that places many graphs alive.

The engine, which runs placed programs, is imported when one of its names is first asked for.
"""

from typing import TYPE_CHECKING, Any

from doppler_jax import methods
from doppler_jax.budget import Budget
from doppler_jax.costs.build import (
    check_costs,
    from_edge_delays,
    make_costs,
    reference_costs,
)
from doppler_jax.costs.calibration import Calibration, load_calibration, save_calibration
from doppler_jax.costs.clusters import list_clusters, load_cluster, make_cluster, save_cluster
from doppler_jax.costs.observed import refit_costs
from doppler_jax.graphs.build import make_graph
from doppler_jax.graphs.formats import (
    from_networkx,
    load_graph,
    load_stg,
    save_graph,
    to_networkx,
)
from doppler_jax.graphs.levels import b_level, b_path, lower_bound_s, t_level, t_path
from doppler_jax.methods import list_methods
from doppler_jax.objective import Objective
from doppler_jax.placed import Placed, load_placed
from doppler_jax.placing import place
from doppler_jax.policy_files import load_policy, save_policy
from doppler_jax.programs.evaluate import evaluate
from doppler_jax.programs.explain import Explanation, explain
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import trace
from doppler_jax.programs.workloads import list_workloads, make_arrays, make_workload
from doppler_jax.reports.gantt import plot_gantt
from doppler_jax.reports.perfetto import write_chrome_trace
from doppler_jax.reports.schedules import ScheduleExplanation, explain_schedule
from doppler_jax.simulator.critical_chain import critical_chain
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.noise import (
    Factors,
    draw_factors,
    makespan_statistics,
    random_ranks,
)
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import SimulationResult, simulate
from doppler_jax.simulator.synchronous import simulate_synchronous
from doppler_jax.simulator.validate import validate
from doppler_jax.training.checkpoint import Policy
from doppler_jax.types import (
    RESIDENT,
    Cluster,
    Costs,
    Schedule,
    ShardedProgram,
    TaskGraph,
)

if TYPE_CHECKING:
    from doppler_jax.engine import (
        LocalDevices,
        PlacedFunction,
        ProcessDevices,
        TaskError,
        cache_compilations,
        compile,
        make_paired_measure,
        measure_calibration,
        measure_s,
        place_and_compile,
        ray_devices,
    )

__version__ = "0.1.0"

__all__ = [
    "RESIDENT",
    "Budget",
    "Calibration",
    "Cluster",
    "Costs",
    "Explanation",
    "Factors",
    "LocalDevices",
    "Objective",
    "Placed",
    "PlacedFunction",
    "Policy",
    "ProcessDevices",
    "Schedule",
    "ScheduleExplanation",
    "ShardedProgram",
    "SimulationResult",
    "TaskError",
    "TaskGraph",
    "b_level",
    "b_path",
    "cache_compilations",
    "check_costs",
    "compile",
    "critical_chain",
    "draw_factors",
    "evaluate",
    "explain",
    "explain_schedule",
    "from_edge_delays",
    "from_networkx",
    "list_clusters",
    "list_methods",
    "list_workloads",
    "load_calibration",
    "load_cluster",
    "load_graph",
    "load_placed",
    "load_policy",
    "load_stg",
    "lower_bound_s",
    "make_arrays",
    "make_cluster",
    "make_costs",
    "make_graph",
    "make_paired_measure",
    "make_workload",
    "makespan_s",
    "makespan_statistics",
    "measure_calibration",
    "measure_s",
    "methods",
    "partition",
    "peak_memory_bytes",
    "place",
    "place_and_compile",
    "plot_gantt",
    "random_ranks",
    "ray_devices",
    "reference_costs",
    "refit_costs",
    "save_calibration",
    "save_cluster",
    "save_graph",
    "save_policy",
    "simulate",
    "simulate_oracle",
    "simulate_synchronous",
    "t_level",
    "t_path",
    "to_networkx",
    "trace",
    "validate",
    "write_chrome_trace",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # and not imported above: it is the engine's
        from doppler_jax import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
