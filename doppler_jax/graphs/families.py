"""Families of random task graphs, from NumPy generators: what one policy for many is made on.

A task makes one tensor. Sizes are plain numbers around 1: costs give them a unit. The largest
family is of random programs on tensors cut into blocks, as sharded networks are.
"""

from collections.abc import Callable, Sequence

import numpy as np

from doppler_jax.graphs.build import make_graph
from doppler_jax.types import TaskGraph

HELD_OUT = ("cholesky", "series_parallel")
"""Families that the base policy is never trained on."""

MAX_KINDS = 6
"""Kinds of tasks that a graph has at most; the tasks of a kind cost about the same."""

Edges = Sequence[tuple[int, int]]
Structure = tuple[np.ndarray, Edges]
"""The kind `[N]` of every task, and (producer, reader) of every edge."""


def list_families() -> list[str]:
    """Returns the names that `make_family` knows, sorted."""
    return sorted(_FAMILIES)


def make_family(name: str, rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """Returns a random graph of a family.

    Args:
      name: of the family.
      rng: of its structure and its sizes.
      num_tasks: about as many tasks; families on a grid come as close as they can.

    Raises:
      ValueError: there is no such family, or `num_tasks` is below 4.
    """
    if name not in _FAMILIES:
        raise ValueError(f"unknown family {name!r}; known: {', '.join(list_families())}")
    if num_tasks < 4:
        raise ValueError(f"num_tasks is {num_tasks}; expected at least 4")
    return _FAMILIES[name](rng, num_tasks)


def _random_sizes(rng: np.random.Generator, structure: Structure) -> TaskGraph:
    """Returns the graph with random sizes per kind, and at times per task."""
    kind, edges = structure
    spread = float(rng.choice([0.0, 0.0, 0.3, 1.0]))
    shape = (int(kind.max(initial=0)) + 1, 2)
    by_kind = np.exp(rng.normal(0.0, rng.uniform(0.0, 1.5), shape))
    sizes = by_kind[kind] * np.exp(rng.normal(0.0, spread, (len(kind), 2)))
    return _graph(sizes[:, 0], sizes[:, 1], edges)


def _graph(flops: np.ndarray, tensor_bytes: np.ndarray, edges: Edges) -> TaskGraph:
    ends = np.array(edges, np.int64).reshape(-1, 2)
    return make_graph(
        flops=flops,
        tensor_producer=np.arange(len(flops)),
        tensor_bytes=tensor_bytes,
        edge_tensor=ends[:, 0],
        edge_reader=ends[:, 1],
    )


def _layered(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """Random layers: a task reads one task of the layer before, and some of any before."""
    most = max(2, round(float(rng.uniform(0.5, 2.0)) * num_tasks**0.5))
    chance, reach = float(rng.uniform(0.1, 1.0)), int(rng.integers(1, 4))
    kinds: list[int] = []
    edges: list[tuple[int, int]] = []
    layers: list[list[int]] = []
    count = 0
    while count < num_tasks:
        size = min(int(rng.integers(1, most + 1)), num_tasks - count)
        tasks = list(range(count, count + size))
        kinds += [int(rng.integers(MAX_KINDS))] * size
        for v in tasks if layers else ():
            edges.append((int(rng.choice(layers[-1])), v))
            near = [u for layer in layers[-reach:] for u in layer]
            extra = int(rng.binomial(min(3, len(near)), chance))
            edges += [(int(u), v) for u in rng.choice(near, extra, replace=False)]
        layers.append(tasks)
        count += size
    return _random_sizes(rng, (np.array(kinds), edges))


def _series_parallel(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """Edges replaced at random by two in series, or by two parallel ways, until it is full."""
    kinds, edges, count = [0, 1], [(0, 1)], 2
    share = float(rng.uniform(0.3, 0.7))
    while count < num_tasks:
        place = int(rng.integers(len(edges)))
        u, v = edges[place]
        kinds.append(int(rng.integers(MAX_KINDS)))
        if rng.random() < share:
            edges[place] = (u, count)
        else:
            edges.append((u, count))
        edges.append((count, v))
        count += 1
    return _random_sizes(rng, (np.array(kinds), edges))


def _fork_join(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """Stages of parallel chains between a fork and a join."""
    kinds, edges, count, join = [0], [], 1, 0
    widest = max(3, min(24, num_tasks // 3))
    while count < num_tasks:
        width, depth = int(rng.integers(2, widest)), int(rng.integers(1, 4))
        fork, steps = join, rng.integers(1, MAX_KINDS, depth).tolist()
        ends = []
        for _ in range(width):
            last = fork
            for kind in steps:
                kinds.append(kind)
                edges.append((last, count))
                last, count = count, count + 1
            ends.append(last)
        kinds.append(0)
        join, count = count, count + 1
        edges += [(end, join) for end in ends]
    return _random_sizes(rng, (np.array(kinds), edges))


def _tree(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """A tree that hands on from its root, or that reduces to it."""
    kinds, edges = [0], []
    open_tasks = [0]
    most = int(rng.integers(2, 6))
    while len(kinds) < num_tasks:
        # The oldest or the youngest open task branches: broad trees, and deep ones.
        parent = open_tasks.pop(0 if rng.random() < 0.7 else -1)
        for _ in range(int(rng.integers(1 if open_tasks else 2, most + 1))):
            edges.append((parent, len(kinds)))
            open_tasks.append(len(kinds))
            kinds.append(int(rng.integers(MAX_KINDS)))
    if rng.random() < 0.5:
        last = len(kinds) - 1
        edges = [(last - v, last - u) for u, v in edges]
    return _random_sizes(rng, (np.array(kinds), edges))


def _butterfly(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """Stages as of a fast Fourier transform, a power of two wide; at times cut short."""
    widest = next(k for k in range(10, 0, -1) if k == 1 or 2**k * (k + 1) <= 1.5 * num_tasks)
    bits = int(rng.integers(max(1, widest - 1), widest + 1))
    width = 2**bits
    stages = max(2, round(num_tasks / width))
    kind = rng.integers(MAX_KINDS, size=stages).repeat(width)
    edges = [
        ((s - 1) * width + partner, s * width + i)
        for s in range(1, stages)
        for i in range(width)
        for partner in (i, i ^ (1 << (s - 1) % bits))
    ]
    return _random_sizes(rng, (kind, edges))


def _stencil(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """A grid swept from a corner, or cells of a row that read their neighbours before."""
    columns = max(2, round(num_tasks**0.5 * float(np.exp(rng.uniform(-0.7, 0.7)))))
    rows = max(2, round(num_tasks / columns))
    is_sweep = rng.random() < 0.5
    edges = []
    for r in range(rows):
        for c in range(columns):
            above = [(r - 1, c)] if is_sweep else [(r - 1, c - 1), (r - 1, c), (r - 1, c + 1)]
            reads = [*above, (r, c - 1)] if is_sweep else above
            edges += [
                (i * columns + j, r * columns + c)
                for i, j in reads
                if i >= 0 and 0 <= j < columns
            ]
    kind = rng.integers(MAX_KINDS, size=rows).repeat(columns)
    return _random_sizes(rng, (kind, edges))


def _random_dag(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """Tasks in a row that read some of those before them, near ones or any."""
    reads = float(rng.uniform(0.8, 2.2))
    reach = max(2, int(num_tasks * float(np.exp(rng.uniform(np.log(0.05), 0.0)))))
    edges: list[tuple[int, int]] = []
    for v in range(1, num_tasks):
        near = np.arange(max(0, v - reach), v)
        count = min(len(near), 6, int(rng.poisson(reads)))
        edges += [(int(u), v) for u in rng.choice(near, count, replace=False)]
    return _random_sizes(rng, (rng.integers(MAX_KINDS, size=num_tasks), edges))


class _Writer:
    """Takes the tasks of a program, in topological order."""

    def __init__(self) -> None:
        self.flops: list[float] = []
        self.tensor_bytes: list[float] = []
        self.edges: list[tuple[int, int]] = []
        self._last: dict[tuple[int, int], int] = {}

    def task(self, flops: float, size: float, *reads: int) -> int:
        task = len(self.flops)
        self.flops.append(flops)
        self.tensor_bytes.append(size)
        self.edges += [(u, task) for u in dict.fromkeys(reads)]
        return task

    def run(self, flops: float, tile: tuple[int, int], *reads: int) -> int:
        """Adds a kernel that works on a tile in place, and so reads its last version, too."""
        before = [self._last[tile]] if tile in self._last else []
        self._last[tile] = self.task(flops, 1.0, *reads, *before)
        return self._last[tile]


def _cholesky(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """Tiled Cholesky factorisation, A = L L^T."""
    tiles = _tiles(num_tasks, lambda t: t * (t + 1) * (t + 2) // 6)
    matrix = _Writer()
    for k in range(tiles):
        factor = matrix.run(1 / 3, (k, k))
        solved = {i: matrix.run(1.0, (i, k), factor) for i in range(k + 1, tiles)}
        for i in range(k + 1, tiles):
            matrix.run(1.0, (i, i), solved[i])
            for j in range(k + 1, i):
                matrix.run(2.0, (i, j), solved[i], solved[j])
    return _tiled(rng, matrix)


def _lu(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """Tiled LU factorisation without pivoting."""
    tiles = _tiles(num_tasks, lambda t: t * (t + 1) * (2 * t + 1) // 6)
    matrix = _Writer()
    for k in range(tiles):
        factor = matrix.run(2 / 3, (k, k))
        rest = range(k + 1, tiles)
        column = {i: matrix.run(1.0, (i, k), factor) for i in rest}
        row = {j: matrix.run(1.0, (k, j), factor) for j in rest}
        for i in rest:
            for j in rest:
                matrix.run(2.0, (i, j), column[i], row[j])
    return _tiled(rng, matrix)


def _tiles(num_tasks: int, count: Callable[[int], int]) -> int:
    """Returns the tiles per side whose number of tasks is closest."""
    return min(range(2, 64), key=lambda tiles: abs(count(tiles) - num_tasks))


def _tiled(rng: np.random.Generator, matrix: _Writer) -> TaskGraph:
    """Returns the graph of equal tiles, at times with kernels of uneven speed."""
    spread = float(rng.choice([0.0, 0.0, 0.2]))
    uneven = np.exp(rng.normal(0.0, spread, len(matrix.flops)))
    return _graph(np.array(matrix.flops) * uneven, np.array(matrix.tensor_bytes), matrix.edges)


GRIDS = ((2, 1), (4, 1), (8, 1), (1, 4), (2, 4), (2, 2), (2, 2), (3, 3), (4, 4))
"""Blocks along rows and columns of a program's tensors."""


def _tensor_program(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """A random program on blocked tensors.

    Its tensors are made by products (over a cut dimension: partial products, then sums),
    element-wise operations and row-wise reductions, and read at random; sums and the like
    cost next to nothing beside products, as they do in networks. The program ends with the
    operation that reaches `num_tasks`.
    """
    writer = _Writer()
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
    return _graph(np.array(writer.flops), np.array(writer.tensor_bytes), writer.edges)


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


_FAMILIES: dict[str, Callable[[np.random.Generator, int], TaskGraph]] = {
    "butterfly": _butterfly,
    "cholesky": _cholesky,
    "fork_join": _fork_join,
    "layered": _layered,
    "lu": _lu,
    "random_dag": _random_dag,
    "series_parallel": _series_parallel,
    "stencil": _stencil,
    "tensor_program": _tensor_program,
    "tree": _tree,
}
