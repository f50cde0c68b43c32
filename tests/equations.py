"""What a function is traced to."""

import jax
from jax.extend.core import jaxprs_in_params


def equations(fn, *arguments):
    """Yields the equations of `fn(*arguments)`, those within others too."""
    left = [jax.make_jaxpr(fn)(*arguments).jaxpr]
    while left:
        for equation in left.pop().eqns:
            yield equation
            left += jaxprs_in_params(equation.params)
