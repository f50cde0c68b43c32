"""Searches for short plans, as native code.

Read `problem` (what a plan is worth), `anytime` (what a search is, and how it is run within a
budget), then the searches: `lns` (ruin and recreate, that of the default method), `walks`
(annealing, the baseline), `drawing` (random placements). `kernels` and `lns_kernels` are what
Numba compiles: moves, evaluation, steps. A new search is a frozen dataclass of
`anytime.Search`, with its loop in a module of compiled code.
"""

from doppler_jax.budget import Budget

__all__ = [
    "Budget",
]
