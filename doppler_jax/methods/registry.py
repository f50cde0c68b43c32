"""The methods that `place` knows by name."""

import importlib
import sys

from doppler_jax.baselines.cpop import cpop_schedule
from doppler_jax.baselines.critical_path import critical_path_schedule
from doppler_jax.baselines.enumerative import enumerative
from doppler_jax.baselines.etf import etf_schedule, m_etf_schedule
from doppler_jax.baselines.heft import heft_schedule
from doppler_jax.baselines.m_sct import m_sct_schedule
from doppler_jax.baselines.peft import peft_schedule
from doppler_jax.baselines.simple import round_robin, single
from doppler_jax.methods.direct import by_solver, listed
from doppler_jax.methods.request import Method
from doppler_jax.methods.searches import PolicySearch, random, searched
from doppler_jax.search.lns import LNS
from doppler_jax.search.walks import Annealing

DEFAULT_METHOD = "doppler+search"
"""Of `place`, the command line and the engine."""

METHODS: dict[str, Method] = {
    "annealing": searched(Annealing()),
    "cpop": listed(cpop_schedule),
    "critical_path": listed(critical_path_schedule),
    "doppler+search": PolicySearch(LNS()),
    "enumerative": listed(enumerative),
    "etf": listed(etf_schedule),
    "exact": by_solver,
    "heft": listed(heft_schedule),
    "lns": searched(LNS()),
    "m_etf": listed(m_etf_schedule),
    "m_sct": listed(m_sct_schedule),
    "peft": listed(peft_schedule),
    "random": random,
    "round_robin": listed(round_robin, mends=False),
    "single": listed(single, mends=False),
}
"""Those that need no networks."""

LEARNED = ("doppler", "gdp", "giph", "joint", "placeto")
"""Those of `learners.registry`, loaded when one is asked for: Flax and Optax take a while."""


OWN: dict[str, Method] = {}
"""Those that users have registered, in this process."""


def register_method(name: str, method: Method) -> None:
    """Gives a method of your own a name, by which `place` and all that calls it know it.

    It can be given another method later, but none of ours can.

    Example:
      >>> def one_flip(request):
      ...     placement = np.zeros(request.graph.num_tasks, int)
      ...     for task in range(request.graph.num_tasks):
      ...         flipped = placement.copy()
      ...         flipped[task] = 1
      ...         request.score(flipped)  # counts, and is remembered
      ...     return placement
      >>> dj.register_method("one_flip", one_flip)
      >>> graph, costs = dj.from_edge_delays([2.0, 2.0, 1.0], [(0, 1, 1.0)], num_devices=2)
      >>> placed = dj.place(graph, costs, method="one_flip")
      >>> placed.makespan_s, placed.evaluations
      (4.0, 3)

    Args:
      name: what it is called.
      method: a function from a `methods.Request` to a `Plan`, to placements `[N]` or `[B, N]`,
        or to None: the best that `request.score` met, which competes in any case.

    Raises:
      ValueError: the name is one of ours or no word, or the method cannot be called.
    """
    if not isinstance(name, str) or not name or ":" in name or is_ours(name):
        raise ValueError(f"name is {name!r}; expected a word that names none of our methods")
    if not callable(method):
        raise ValueError(f"method {name!r} is {method!r}; expected a function")
    OWN[name] = method


def list_methods() -> list[str]:
    """Returns the names that `place` knows.

    Example:
      >>> "heft" in dj.list_methods()
      True
    """
    return sorted({*METHODS, *LEARNED, *OWN})


def find_method(method: str | Method) -> Method:
    """Returns the method of that name; one that is a method already is returned as it is.

    A name with a colon is `module:function`, which is imported, also from the folder that
    the process runs in.

    Raises:
      ValueError: no method has that name, or it cannot be imported; the message says what is.
    """
    if callable(method):
        return method
    if found := METHODS.get(method) or OWN.get(method):
        return found
    if method in LEARNED:
        from doppler_jax.learners.registry import LEARNERS
        from doppler_jax.methods.learned import Learned

        return Learned(LEARNERS[method])
    if ":" in method:
        return _imported(method)
    raise ValueError(f"unknown method {method!r}; known: {', '.join(list_methods())}")


def _imported(name: str) -> Method:
    module, _, function = name.partition(":")
    sys.path[:0] = [] if "" in sys.path else [""]
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"method {name!r} cannot be imported: {error}") from error


def is_ours(method: str) -> bool:
    """Returns whether the name is of a method of this library, the same in any process."""
    return method in METHODS or method in LEARNED


def policy_of(method: str | Method) -> str | None:
    """Returns which method's policies a method can use, None if it takes none."""
    return getattr(find_method(method), "takes", None)
