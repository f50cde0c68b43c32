"""Learned placement of JAX programs on devices: trace, partition, cost, place, simulate, run.

Thirty names are here, in `__all__`; the others are in the modules `MODULES`, by subject:
`dj.graphs.save_graph`.

Beside the packages, from below: `types.py` is the data that all share, `files.py` reads and
writes text and JSON; `objective.py` says what a placement is judged by, `budget.py` what a
search or a training may spend. `problems.py` makes a graph and costs of what a command line
names, `policy_files.py` keeps policies. `placing.py` is `place`, `placed.py` what it returns,
and `__main__.py` the command line, with what all command lines share in `cli.py`.
`native` is how Numba compiles code, `caches.py` where JAX keeps its own; `memory_maps.py`
keeps a process that places many graphs alive.

The engine, which runs placed programs, and policies are imported when they are first asked for.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from doppler_jax import costs as costs
from doppler_jax import graphs as graphs
from doppler_jax import methods as methods
from doppler_jax import programs as programs
from doppler_jax import reports as reports
from doppler_jax import search as search
from doppler_jax import simulator as simulator
from doppler_jax.costs import clusters as clusters
from doppler_jax.costs.build import from_edge_delays, make_costs, reference_costs
from doppler_jax.costs.clusters import load_cluster, make_cluster
from doppler_jax.costs.pins import pin
from doppler_jax.graphs.bounds import lower_bound_s
from doppler_jax.graphs.build import make_graph
from doppler_jax.graphs.formats import from_networkx, load_graph
from doppler_jax.methods.registry import list_methods, register_method
from doppler_jax.objective import Objective
from doppler_jax.placed import Placed, load_placed
from doppler_jax.placing import place
from doppler_jax.programs import workloads as workloads
from doppler_jax.programs.evaluate import evaluate
from doppler_jax.programs.explain import explain
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import trace
from doppler_jax.reports.compare import compare
from doppler_jax.reports.schedules import explain_schedule
from doppler_jax.simulator.simulate import simulate
from doppler_jax.types import Cluster, Costs, Plan

if TYPE_CHECKING:
    from doppler_jax import engine as engine
    from doppler_jax import policies as policies
    from doppler_jax.engine import compile, distribute, ray_devices
    from doppler_jax.policies import load_policy

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Costs",
    "Objective",
    "Placed",
    "Plan",
    "compare",
    "compile",
    "distribute",
    "evaluate",
    "explain",
    "explain_schedule",
    "from_edge_delays",
    "from_networkx",
    "list_methods",
    "load_cluster",
    "load_graph",
    "load_placed",
    "load_policy",
    "lower_bound_s",
    "make_cluster",
    "make_costs",
    "make_graph",
    "partition",
    "pin",
    "place",
    "ray_devices",
    "reference_costs",
    "register_method",
    "simulate",
    "trace",
]

MODULES = (
    "clusters",
    "costs",
    "engine",
    "graphs",
    "methods",
    "policies",
    "programs",
    "reports",
    "search",
    "simulator",
    "workloads",
)
"""Where the other public names are: those in a module's own `__all__`."""

_LATE = {
    "compile": "engine",
    "distribute": "engine",
    "engine": "",
    "load_policy": "policies",
    "policies": "",
    "ray_devices": "engine",
}
"""Module of what is imported when it is first asked for, by name; none where it is one."""


def __getattr__(name: str) -> Any:
    if name in _LATE:
        module = importlib.import_module(f"doppler_jax.{_LATE[name] or name}")
        return getattr(module, name) if _LATE[name] else module
    hint = ""
    if not name.startswith("_"):  # else nobody has mistyped it
        where = {one: f"dj.{module}.{one}" for module in MODULES for one in _names_in(module)}
        where |= {one: f"dj.{one}" for one in __all__}
        near = [name] if name in where else difflib.get_close_matches(name, where)
        hint = f"; the nearest: {', '.join(where[one] for one in near)}" if near else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def _names_in(module: str) -> list[str]:
    return (globals().get(module) or __getattr__(module)).__all__


def __dir__() -> list[str]:
    return sorted({*__all__, *MODULES, "__version__"})
