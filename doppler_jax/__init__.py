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

A name's module is imported when the name is first asked for, so that what does not need JAX
starts without it.
"""

import difflib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from doppler_jax import costs as costs
    from doppler_jax import engine as engine
    from doppler_jax import graphs as graphs
    from doppler_jax import methods as methods
    from doppler_jax import policies as policies
    from doppler_jax import programs as programs
    from doppler_jax import reports as reports
    from doppler_jax import search as search
    from doppler_jax import simulator as simulator
    from doppler_jax.costs import clusters as clusters
    from doppler_jax.costs.build import from_edge_delays, make_costs, reference_costs
    from doppler_jax.costs.clusters import load_cluster, make_cluster
    from doppler_jax.costs.pins import pin
    from doppler_jax.engine import compile, distribute, ray_devices
    from doppler_jax.graphs.bounds import lower_bound_s
    from doppler_jax.graphs.build import make_graph
    from doppler_jax.graphs.formats import from_networkx, load_graph
    from doppler_jax.methods.registry import list_methods, register_method
    from doppler_jax.objective import Objective
    from doppler_jax.placed import Placed, load_placed
    from doppler_jax.placing import place
    from doppler_jax.policies import load_policy
    from doppler_jax.programs import workloads as workloads
    from doppler_jax.programs.evaluate import evaluate
    from doppler_jax.programs.explain import explain
    from doppler_jax.programs.partition import partition
    from doppler_jax.programs.trace import trace
    from doppler_jax.reports.compare import compare
    from doppler_jax.reports.schedules import explain_schedule
    from doppler_jax.simulator.simulate import simulate
    from doppler_jax.types import Cluster, Costs, Plan

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

_HOMES = {
    name: module
    for module, names in {
        "costs.build": "from_edge_delays make_costs reference_costs",
        "costs.clusters": "load_cluster make_cluster",
        "costs.pins": "pin",
        "engine": "compile distribute ray_devices",
        "graphs.bounds": "lower_bound_s",
        "graphs.build": "make_graph",
        "graphs.formats": "from_networkx load_graph",
        "methods.registry": "list_methods register_method",
        "objective": "Objective",
        "placed": "Placed load_placed",
        "placing": "place",
        "policies": "load_policy",
        "programs.evaluate": "evaluate",
        "programs.explain": "explain",
        "programs.partition": "partition",
        "programs.trace": "trace",
        "reports.compare": "compare",
        "reports.schedules": "explain_schedule",
        "simulator.simulate": "simulate",
        "types": "Cluster Costs Plan",
    }.items()
    for name in names.split()
}
"""Module of each name, which is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name in _HOMES or name in MODULES:
        # Whoever comes by this door may hand our data to JAX; our command lines do not.
        importlib.import_module("doppler_jax.types").register_pytrees()
        module = importlib.import_module(f"doppler_jax.{_HOMES.get(name) or _module(name)}")
        globals()[name] = found = getattr(module, name) if name in _HOMES else module
        return found
    hint = ""
    # Nobody has mistyped these; the import system asks before it looks for a module of ours.
    if not name.startswith("_") and importlib.util.find_spec(f"doppler_jax.{name}") is None:
        where = {one: f"dj.{module}.{one}" for module in MODULES for one in _names_in(module)}
        where |= {one: f"dj.{one}" for one in __all__}
        near = [name] if name in where else difflib.get_close_matches(name, where)
        hint = f"; the nearest: {', '.join(where[one] for one in near)}" if near else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def _module(name: str) -> str:
    return {"clusters": "costs.clusters", "workloads": "programs.workloads"}.get(name, name)


def _names_in(module: str) -> list[str]:
    return importlib.import_module(f"doppler_jax.{_module(module)}").__all__


def __dir__() -> list[str]:
    return sorted({*__all__, *MODULES, "__version__"})
