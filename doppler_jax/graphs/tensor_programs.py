"""Random programs on tensors cut into blocks: the task graphs that sharded networks have."""

import dataclasses

import numpy as np

GRIDS = ((2, 1), (4, 1), (8, 1), (1, 4), (2, 4), (2, 2), (2, 2), (3, 3), (4, 4))
"""Blocks along rows and columns of a program's tensors."""


@dataclasses.dataclass
class _Writer:
    """Takes the tasks of a program, in topological order."""

    flops: list[float]
    tensor_bytes: list[float]
    edges: list[tuple[int, int]]

    def task(self, flops: float, size: float, *reads: int) -> int:
        task = len(self.flops)
        self.flops.append(flops)
        self.tensor_bytes.append(size)
        self.edges += [(u, task) for u in dict.fromkeys(reads)]
        return task


def tensor_program(
    rng: np.random.Generator, num_tasks: int
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Returns flops `[N]`, bytes `[N]` and edges of a random blocked program.

    Its tensors are made by products (over a cut dimension: partial products, then sums),
    element-wise operations and row-wise reductions, and read at random; sums and the like
    cost next to nothing beside products, as they do in networks.

    Args:
      rng: of everything.
      num_tasks: the program ends with the operation that reaches it.
    """
    writer = _Writer([], [], [])
    # Of those whose product leaves room for more.
    grids = [g for g in GRIDS if g == GRIDS[0] or 2 * g[0] * g[1] * max(g) <= num_tasks]
    grid = grids[int(rng.integers(len(grids)))]
    cheap = float(np.exp(rng.uniform(np.log(1e-3), np.log(0.5))))  # of an element-wise task
    spread = float(rng.choice([0.0, 0.5, 1.0]))  # of operations' sizes
    in_tree = bool(rng.random() < 0.5)
    tensors: list[np.ndarray] = []
    while len(writer.flops) < num_tasks:
        size = float(np.exp(rng.normal(0.0, spread)))
        recent = tensors[-4:]
        kind = rng.random() if recent else 0.0
        first = recent[int(rng.integers(len(recent)))] if recent else None
        if kind < 0.55:
            # Every so often a product of two inputs begins a new branch.
            if rng.random() < 0.25:
                first = None
            second = recent[int(rng.integers(len(recent)))] if recent else None
            if first is None or rng.random() < 0.6:
                second = None
            made = _product(writer, grid, first, second, size, cheap, in_tree)
        elif kind < 0.8 or first is None:
            others = [recent[int(rng.integers(len(recent)))]] if rng.random() < 0.6 else []
            made = _elementwise(writer, [x for x in (first, *others) if x is not None], cheap)
        else:
            made = _normalise(writer, first, cheap)
        tensors.append(made)
    return np.array(writer.flops), np.array(writer.tensor_bytes), writer.edges


def _product(
    writer: _Writer,
    grid: tuple[int, int],
    first: np.ndarray | None,
    second: np.ndarray | None,
    size: float,
    cheap: float,
    in_tree: bool,
) -> np.ndarray:
    """A product of blocked matrices; a factor that is None is an input, everywhere at hand."""
    rows, columns = grid
    made = np.zeros(grid, np.int64)
    depth = columns if first is not None or second is None else second.shape[0]
    for i in range(rows):
        for j in range(columns):
            parts = []
            for k in range(depth):
                left = [] if first is None else [int(first[i, k])]
                right = [] if second is None else [int(second[k % rows, j])]
                parts.append(writer.task(size, 1.0, *left, *right))
            made[i, j] = _sum(writer, parts, cheap, in_tree)
    return made


def _sum(writer: _Writer, parts: list[int], cheap: float, in_tree: bool) -> int:
    if len(parts) == 1:
        return parts[0]
    if not in_tree:
        return writer.task(cheap, 1.0, *parts)
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [writer.task(cheap, 1.0, *p) if len(p) > 1 else p[0] for p in pairs]
    return parts[0]


def _elementwise(writer: _Writer, operands: list[np.ndarray], cheap: float) -> np.ndarray:
    blocks = zip(*(x.ravel().tolist() for x in operands), strict=True)
    made = [writer.task(cheap, 1.0, *block) for block in blocks]
    return np.array(made).reshape(operands[0].shape)


def _normalise(writer: _Writer, operand: np.ndarray, cheap: float) -> np.ndarray:
    """A statistic of every row of blocks, and then every block divided by it."""
    made = np.zeros_like(operand)
    for i, row in enumerate(operand.tolist()):
        statistic = writer.task(cheap, 0.01, *row)
        for j, block in enumerate(row):
            made[i, j] = writer.task(cheap, 1.0, block, statistic)
    return made
