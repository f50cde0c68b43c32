"""How each JAX primitive acts on blocks: one small rule per primitive.

Adding a primitive is adding a rule to the table of the module where it belongs. What has
no rule runs whole, as one task.
"""

from doppler_jax.programs.labelling import Labelling, Labels, Shape
from doppler_jax.programs.program import Equation
from doppler_jax.programs.rules import (
    algebra,
    contractions,
    elementwise,
    indexing,
    movement,
    windows,
)
from doppler_jax.programs.rules.build import Rule, make_whole
from doppler_jax.programs.rules.costs import whole_flops
from doppler_jax.programs.rules.elementwise import ELEMENTWISE
from doppler_jax.programs.rules.movement import VIEWS

__all__ = [
    "ELEMENTWISE",
    "RULES",
    "VIEWS",
    "Labelling",
    "Labels",
    "Rule",
    "Shape",
    "equation_flops",
    "get_labelling",
]

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **movement.RULES,
    **contractions.RULES,
    **windows.RULES,
    **indexing.RULES,
    **algebra.RULES,
}
"""The rule of every primitive that can be cut, by the primitive's name."""


def get_labelling(equation: Equation) -> Labelling:
    """Returns the labels of an equation's operands and results; whole if no rule covers it."""
    rule = RULES.get(equation.primitive.name)
    labelling = None if rule is None or equation.has_effect else rule(equation)
    return labelling or make_whole(equation, whole_flops(equation, equation_flops))


def equation_flops(equation: Equation) -> float:
    """Returns the operations of one equation, of the functions that it calls included."""
    return get_labelling(equation).task_flops({})
