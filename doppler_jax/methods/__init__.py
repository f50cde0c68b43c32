"""Placement methods: what `place` calls, by name or as it is.

Read `request.py` first: a method is a function from a `Request` to a plan, or `Candidates`;
`own.py` takes what it returns. Then
`direct.py` (list schedulers and the exact solver), `searches.py` (searches, and the default
method's search from a policy's samples), `learned.py` (what trains for the problem at hand,
or draws from a policy that is given), `beside.py` (the exact solver in a thread beside a
search), `child.py` (work in a process beside this one), and `registry.py`, the names and the
default.

To add a list scheduler, write it in `baselines/`, a search in `search/`, a learner in
`learners/`; then give it a row in `registry.py`. A method of your own needs no row:

    dj.place(graph, costs, method=dj.methods.doppler(PolicyConfig(select="b_level")))
    dj.place(graph, costs, method=dj.methods.searched(LNS(members=8)))
    dj.place(graph, costs, method=lambda request: my_placements(request.graph))
"""

from typing import TYPE_CHECKING, Any

from doppler_jax.methods.direct import listed
from doppler_jax.methods.registry import (
    DEFAULT_METHOD,
    METHODS,
    find_method,
    list_methods,
    policy_of,
)
from doppler_jax.methods.request import Candidates, Method, Request
from doppler_jax.methods.searches import PolicySearch, searched

if TYPE_CHECKING:
    from doppler_jax.methods.learned import Learned, doppler

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "Candidates",
    "Learned",
    "Method",
    "PolicySearch",
    "Request",
    "doppler",
    "find_method",
    "list_methods",
    "listed",
    "policy_of",
    "searched",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # and not imported above
        from doppler_jax.methods import learned

        return getattr(learned, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
