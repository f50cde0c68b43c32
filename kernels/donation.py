"""Which operands a task may give away, for its results to take their memory."""

from doppler_jax.programs.blocks import num_bytes
from doppler_jax.types import Kernel

from .plan import Plan

MIN_BYTES = 1 << 20
"""Smaller operands are kept: giving them away saves nothing, and costs an executable."""


def donated_operands(plan: Plan, v: int, kernel: Kernel) -> tuple[int, ...]:
    """Returns the positions of the operands of task `v` whose memory its results may take.

    Those that the task alone reads, once, that were made or received in the same call, and
    that have the shape and type of a result that takes no other's memory. Who donates
    cannot ask the operand any more whether it is there, so this is for dispatch that waits
    for every task before it goes on.
    """
    laid = {slot for _, _, slot in plan.inputs}
    free = [(result.shape, result.dtype) for result in kernel.results]
    donated = []
    for position, slot in enumerate(plan.operands[v]):
        operand = kernel.operands[position]
        kind = (operand.shape, operand.dtype)
        once = plan.num_reads[slot] == 1 and plan.operands[v].count(slot) == 1
        if once and slot not in laid and kind in free and num_bytes(operand) >= MIN_BYTES:
            free.remove(kind)
            donated.append(position)
    return tuple(donated)
