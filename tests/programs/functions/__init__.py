"""Functions that nobody tuned the partitioner for; importing this fills `CASES`."""

from tests.programs.functions import arrays, control, edges, models, numerics, training
from tests.programs.functions.registry import CASES, assert_same, fresh

MODULES = arrays, control, edges, models, numerics, training
__all__ = ["CASES", "MODULES", "assert_same", "fresh"]
