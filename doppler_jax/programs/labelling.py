"""What a rule says about one equation: which dimensions are cut alike.

In the tensor relational algebra a tensor is a relation from block index to block. A
labelling gives every dimension of an equation's operands and results a label. Dimensions
of equal label are cut into equally many blocks and joined on equal block index; a label
that the results lack is aggregated over.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

Labels = tuple[int, ...]
Shape = tuple[int, ...]

BlockParams = Callable[[tuple[Shape, ...], tuple[Shape, ...]], dict[str, Any]]
"""Maps the shapes of the operands' and results' blocks to the parameters that differ."""


@dataclasses.dataclass(frozen=True)
class Labelling:
    """What one equation (or group of equations) does to blocks; labels are 0..L-1.

    A label's size is what its number of blocks has to divide. It is the size of the
    dimensions that bear the label; where an equation merges or splits dimensions, a
    dimension's size may be a multiple of it, and a block's size is always the
    dimension's size over the number of blocks.
    """

    sizes: tuple[int, ...]  # [L]
    operands: tuple[Labels, ...]  # per operand, a label per dimension
    results: tuple[Labels, ...]  # per result, likewise
    flops: float  # per point of the space that all labels span
    aggregate: str | None = None  # "sum", "max", ...: how partial results combine
    whole: bool = False  # True: no label may be cut, the equation is one task
    fixed: frozenset[int] = frozenset()
    """Labels that may not be cut: a task needs all of them, as a sort its dimension."""
    block_params: BlockParams | None = None

    @property
    def aggregated(self) -> Labels:
        """Labels of the operands over which partial results are combined, increasing."""
        if self.aggregate is None:
            return ()
        found = {label for labels in self.operands for label in labels}
        kept = {label for labels in self.results for label in labels}
        return tuple(sorted(found - kept - self.fixed))

    def max_count(self, label: int) -> int:
        """Returns the largest power of two into which the label may be cut."""
        size = self.sizes[label]
        if self.whole or label in self.fixed or size == 0:
            return 1
        return size & -size

    def task_flops(self, counts: Mapping[int, int]) -> float:
        """Returns the operations of one task, with `counts[label]` blocks per label."""
        return self.flops * math.prod(self.sizes) / math.prod(counts.values())
