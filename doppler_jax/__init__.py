"""Learned placement of JAX programs on devices: trace, partition, cost, place, simulate, run.

Beside the packages, from below: `types.py` is the data that all share, `files.py` reads and
writes text and JSON; `objective.py` says what a placement is judged by, `budget.py` what a
search or a training may spend. `problems.py` makes a graph and costs of what a command line
names, `policy_files.py` keeps policies. `placing.py` is `place`, `placed.py` what it returns,
and `__main__.py` the command line, with what all command lines share in `cli.py`.
`native` is how Numba compiles code, `caches.py` where JAX keeps its own; `memory_maps.py`
keeps a process that places many graphs alive.

What is imported here under its own name is public. The engine, which runs placed programs, and
files of policies are imported when one of their names is first asked for.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from doppler_jax import methods as methods
from doppler_jax.budget import Budget as Budget
from doppler_jax.costs.build import check_costs as check_costs
from doppler_jax.costs.build import from_edge_delays as from_edge_delays
from doppler_jax.costs.build import make_costs as make_costs
from doppler_jax.costs.build import reference_costs as reference_costs
from doppler_jax.costs.calibration import Calibration as Calibration
from doppler_jax.costs.calibration import load_calibration as load_calibration
from doppler_jax.costs.calibration import save_calibration as save_calibration
from doppler_jax.costs.clusters import list_clusters as list_clusters
from doppler_jax.costs.clusters import load_cluster as load_cluster
from doppler_jax.costs.clusters import make_cluster as make_cluster
from doppler_jax.costs.clusters import save_cluster as save_cluster
from doppler_jax.costs.observed import refit_costs as refit_costs
from doppler_jax.costs.pins import pin as pin
from doppler_jax.graphs.bounds import lower_bound_s as lower_bound_s
from doppler_jax.graphs.build import make_graph as make_graph
from doppler_jax.graphs.formats import from_networkx as from_networkx
from doppler_jax.graphs.formats import load_graph as load_graph
from doppler_jax.graphs.formats import load_stg as load_stg
from doppler_jax.graphs.formats import save_graph as save_graph
from doppler_jax.graphs.levels import b_level as b_level
from doppler_jax.graphs.levels import b_path as b_path
from doppler_jax.graphs.levels import t_level as t_level
from doppler_jax.graphs.levels import t_path as t_path
from doppler_jax.methods import list_methods as list_methods
from doppler_jax.objective import Objective as Objective
from doppler_jax.placed import Placed as Placed
from doppler_jax.placed import load_placed as load_placed
from doppler_jax.placing import place as place
from doppler_jax.programs.evaluate import evaluate as evaluate
from doppler_jax.programs.explain import Explanation as Explanation
from doppler_jax.programs.explain import explain as explain
from doppler_jax.programs.partition import partition as partition
from doppler_jax.programs.trace import trace as trace
from doppler_jax.programs.workloads import list_workloads as list_workloads
from doppler_jax.programs.workloads import make_arrays as make_arrays
from doppler_jax.programs.workloads import make_workload as make_workload
from doppler_jax.reports.compare import Comparison as Comparison
from doppler_jax.reports.compare import compare as compare
from doppler_jax.reports.gantt import plot_gantt as plot_gantt
from doppler_jax.reports.perfetto import write_chrome_trace as write_chrome_trace
from doppler_jax.reports.schedules import ScheduleExplanation as ScheduleExplanation
from doppler_jax.reports.schedules import explain_schedule as explain_schedule
from doppler_jax.simulator.critical_chain import critical_chain as critical_chain
from doppler_jax.simulator.memory import peak_memory_bytes as peak_memory_bytes
from doppler_jax.simulator.noise import Factors as Factors
from doppler_jax.simulator.noise import draw_factors as draw_factors
from doppler_jax.simulator.noise import makespan_statistics as makespan_statistics
from doppler_jax.simulator.noise import random_ranks as random_ranks
from doppler_jax.simulator.oracle import makespan_s as makespan_s
from doppler_jax.simulator.oracle import simulate_oracle as simulate_oracle
from doppler_jax.simulator.simulate import SimulationResult as SimulationResult
from doppler_jax.simulator.simulate import simulate as simulate
from doppler_jax.simulator.synchronous import simulate_synchronous as simulate_synchronous
from doppler_jax.simulator.validate import validate as validate
from doppler_jax.types import RESIDENT as RESIDENT
from doppler_jax.types import Cluster as Cluster
from doppler_jax.types import Costs as Costs
from doppler_jax.types import Plan as Plan
from doppler_jax.types import Policy as Policy
from doppler_jax.types import Schedule as Schedule
from doppler_jax.types import ShardedProgram as ShardedProgram
from doppler_jax.types import TaskGraph as TaskGraph

if TYPE_CHECKING:
    from doppler_jax.engine.automatic import place_and_compile as place_and_compile
    from doppler_jax.engine.calibrate import measure_calibration as measure_calibration
    from doppler_jax.engine.devices import TaskError as TaskError
    from doppler_jax.engine.distribute import distribute as distribute
    from doppler_jax.engine.local import LocalDevices as LocalDevices
    from doppler_jax.engine.measure import make_paired_measure as make_paired_measure
    from doppler_jax.engine.measure import measure_s as measure_s
    from doppler_jax.engine.placed import PlacedFunction as PlacedFunction
    from doppler_jax.engine.placed import compile as compile
    from doppler_jax.engine.processes.driver import ProcessDevices as ProcessDevices
    from doppler_jax.engine.processes.ray import ray_devices as ray_devices
    from doppler_jax.policy_files import load_policy as load_policy
    from doppler_jax.policy_files import save_policy as save_policy

__version__ = "0.1.0"

_LATE = {
    "LocalDevices": "engine.local",
    "PlacedFunction": "engine.placed",
    "ProcessDevices": "engine.processes.driver",
    "TaskError": "engine.devices",
    "compile": "engine.placed",
    "distribute": "engine.distribute",
    "load_policy": "policy_files",
    "make_paired_measure": "engine.measure",
    "measure_calibration": "engine.calibrate",
    "measure_s": "engine.measure",
    "place_and_compile": "engine.automatic",
    "ray_devices": "engine.processes.ray",
    "save_policy": "policy_files",
}
"""Module of what is imported when it is first asked for, by name."""


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(f"doppler_jax.{_LATE[name]}"), name)
    near: list[str] = []
    if not name.startswith("_"):  # else nobody has mistyped it
        near = difflib.get_close_matches(name, [x for x in __dir__() if x[0] != "_"])
    hint = f"; the nearest: {', '.join(near)}" if near else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
