"""Functions that nobody tuned the partitioner for; importing this fills `CASES`."""

from tests.programs.functions import arrays, control, edges, models, numerics, training
from tests.programs.functions.registry import CASES, Case, assert_same, fresh

__all__ = [
    "CASES",
    "Case",
    "arrays",
    "assert_same",
    "control",
    "edges",
    "fresh",
    "models",
    "numerics",
    "training",
]
