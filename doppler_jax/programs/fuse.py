"""Joins equations into groups, so that tasks stay coarse.

Element-wise equations join the group that reads their result, or the equation that made
their operand joins them, as long as nobody else reads what lies between. Views, which only
relabel dimensions, are applied by whoever reads them and make no group.
"""

import dataclasses
import math
from collections import Counter

from doppler_jax.programs.program import Atom, Equation, Program, Value
from doppler_jax.programs.rules import ELEMENTWISE, VIEWS, get_labelling
from doppler_jax.programs.rules.labels import BlockParams, Labelling, Labels

_ENOUGH_BLOCKS = 64
"""A group need not allow more blocks than this; below, fusing must not cost any."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One equation inside a group.

    Slots number the values within a group: its operands, then each step's results.
    """

    equation: Equation
    reads: tuple[int, ...]  # slot of every operand
    results: tuple[Labels, ...]  # in the group's labels
    flops: float  # per element of the first result
    block_params: BlockParams | None


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A unit of partitioning: a root equation and the element-wise ones fused behind it.

    The first `num_root_operands` operands are read by the root's tasks. The others, which
    only the fused equations read, are read by the same tasks, or by the aggregating tasks
    if the root's partial results have to be combined first: the epilogue runs there.

    Views only relabel dimensions (a broadcast, a transpose) or count (iota). A group
    computes those that it reads inside its tasks, so that `operands` are the tensors
    behind the views.
    """

    number: int  # among the groups of the program
    name: str  # readable and unique, "attn.qk.dot_general"
    equations: tuple[Equation, ...]  # without views; root first, then as they can run
    operands: tuple[Atom, ...]  # literals included; each atom once per way to label it
    num_root_operands: int
    results: tuple[Value, ...]
    labelling: Labelling  # of `operands` and `results`; flops are the root's
    steps: tuple[Step, ...]  # views included, as they run
    num_root_steps: int  # the first steps, up to the root

    @property
    def root(self) -> Equation:
        return self.equations[0]

    @property
    def epilogue_flops(self) -> float:
        """Operations of the fused equations, per element of the result."""
        return sum(step.flops for step in self.steps[self.num_root_steps :])


def fuse(program: Program) -> tuple[Group, ...]:
    """Returns the groups of a program, in an order in which they can run."""
    labellings = {equation: get_labelling(equation) for equation in program.equations}
    # Views that would cost blocks are left out.
    views = {
        equation.results[0]: equation
        for equation, labelling in labellings.items()
        if equation.primitive.name in VIEWS and _is_divisible(equation, labelling)
    }
    names: Counter[str] = Counter()
    return tuple(
        _GroupBuilder(labellings, views).build(number, _unique_name(members, names), members)
        for number, members in enumerate(_find_members(program, labellings, views))
    )


def _is_divisible(equation: Equation, labelling: Labelling) -> bool:
    """True if the equation can be cut into about as many blocks as its result's shape can."""
    possible = math.prod(size & -size for size in equation.results[0].aval.shape if size)
    found = math.prod(map(labelling.max_count, labelling.results[0]))
    return not labelling.whole and found >= min(_ENOUGH_BLOCKS, possible)


@dataclasses.dataclass
class _Region:
    """Equations that become a group, found from its last equation backwards."""

    shape: tuple[int, ...] | None  # of all results; None: nothing can join
    members: list[Equation]  # in the order of the program
    has_root: bool


def _find_members(
    program: Program, labellings: dict[Equation, Labelling], views: dict[Value, Equation]
) -> list[list[Equation]]:
    """Returns each group's equations, root first, by the position of its last one.

    What joins a group is read by element-wise equations of that group alone. So every path
    from a member leads through members to the last one, and no group waits for itself.
    """
    readers: dict[Atom, list[Equation]] = {}
    for equation in program.equations:
        for atom in dict.fromkeys(equation.operands):
            readers.setdefault(atom, []).append(equation)
    outputs = set(program.outputs)
    region_of: dict[Equation, _Region] = {}
    regions = []
    for equation in reversed(program.equations):
        labelling = labellings[equation]
        read_by = [] if not equation.results else readers.get(equation.results[0], [])
        is_output = not outputs.isdisjoint(equation.results)
        is_view = not is_output and views.keys() >= set(equation.results) != set()
        if is_view and not any(labellings[reader].whole for reader in read_by):
            continue
        pointwise = _is_pointwise(equation, labelling)
        region = None if is_output else _joinable(equation, labelling, read_by, region_of)
        if region is None:
            shape = equation.results[0].aval.shape if pointwise else None
            region = _Region(shape, [], not pointwise)
            regions.append(region)
        region.members.insert(0, equation)
        region.has_root |= not pointwise
        if pointwise:
            region_of[equation] = region
    return [
        sorted(region.members, key=lambda e: _is_pointwise(e, labellings[e]))
        for region in reversed(regions)
    ]


def _joinable(
    equation: Equation,
    labelling: Labelling,
    read_by: list[Equation],
    region_of: dict[Equation, _Region],
) -> _Region | None:
    """Returns the region that alone reads the result, if the equation may join it."""
    regions = [region_of.get(reader) for reader in read_by]
    region = regions[0] if regions else None
    if region is None or any(other is not region for other in regions):
        return None
    if len(equation.results) > 1 or equation.results[0].aval.shape != region.shape:
        return None
    if _is_pointwise(equation, labelling):
        return region
    return None if region.has_root or not _is_divisible(equation, labelling) else region


def _is_pointwise(equation: Equation, labelling: Labelling) -> bool:
    return equation.primitive.name in ELEMENTWISE and not labelling.whole


def _unique_name(members: list[Equation], names: Counter[str]) -> str:
    """Names a group after its root, or what element-wise equations end in."""
    named = members[0] if members[0].primitive.name not in ELEMENTWISE else members[-1]
    # A batched product's scope may be its einsum, which names nothing.
    scopes = [part for part in named.scope.split("/") if part and "->" not in part]
    name = base = ".".join([*scopes, named.primitive.name])
    while names[name]:
        names[base] += 1
        name = f"{base}_{names[base] - 1}"
    names[name] += 1
    return name


class _GroupBuilder:
    """Composes the labellings of a group's equations and of the views that they read."""

    def __init__(
        self, labellings: dict[Equation, Labelling], views: dict[Value, Equation]
    ) -> None:
        self._labellings = labellings
        self._views = views
        self._sizes: list[int] = []
        self._fixed: set[int] = set()
        self._operands: dict[tuple[Atom, Labels], int] = {}  # to slot
        # While the number of operands grows, the results' slots count from -1 downwards.
        self._made: dict[tuple[Atom, Labels], int] = {}
        self._steps: list[Step] = []
        self._num_made = 0

    def build(self, number: int, name: str, members: list[Equation]) -> Group:
        """Returns the group of equations `members`, root first."""
        root, *epilogue = members
        own = self._labellings[root]
        mapping = self._adopt(own, None)
        results = self._add_step(root, own, mapping)
        num_root_operands, num_root_steps = len(self._operands), len(self._steps)
        # The epilogue may run in another task, which has to apply its views again.
        self._made = {key: self._made[key] for key in zip(root.results, results, strict=True)}
        for equation in epilogue:
            labelling = self._labellings[equation]
            self._add_step(equation, labelling, self._adopt(labelling, results[0]))
        aggregated = {mapping[label] for label in own.aggregated}
        return Group(
            number=number,
            name=name,
            equations=tuple(members),
            operands=tuple(atom for atom, _ in self._operands),
            num_root_operands=num_root_operands,
            results=members[-1].results,
            labelling=self._labelling(own, results, aggregated),
            steps=tuple(
                dataclasses.replace(step, reads=tuple(map(self._slot, step.reads)))
                for step in self._steps
            ),
            num_root_steps=num_root_steps,
        )

    def _labelling(
        self, own: Labelling, results: tuple[Labels, ...], aggregated: set[int]
    ) -> Labelling:
        operands = tuple(labels for _, labels in self._operands)
        read = {label for labels in operands for label in labels}
        kept = {label for labels in results for label in labels}
        # What views dropped, or only views have, is neither cut nor aggregated over.
        self._fixed |= set(range(len(self._sizes))) - kept - (aggregated & read)
        return Labelling(
            sizes=tuple(self._sizes),
            operands=operands,
            results=results,
            flops=own.task_flops({}) / max(1, math.prod(self._sizes)),
            aggregate=own.aggregate,
            whole=own.whole,
            fixed=frozenset(self._fixed),
        )

    def _adopt(self, labelling: Labelling, result: Labels | None) -> dict[int, int]:
        """Returns the group's label of every label of an equation, `result` being known."""
        mapping: dict[int, int] = {}
        for label, known in zip(labelling.results[0], result, strict=True) if result else ():
            mapping[label] = known
            self._sizes[known] = math.gcd(self._sizes[known], labelling.sizes[label])
        for label, size in enumerate(labelling.sizes):
            if label not in mapping:
                mapping[label] = len(self._sizes)
                self._sizes.append(size)
        self._fixed |= {mapping[label] for label in labelling.fixed}
        return mapping

    def _add_step(
        self, equation: Equation, labelling: Labelling, mapping: dict[int, int]
    ) -> tuple[Labels, ...]:
        """Appends an equation behind the views that it reads; returns its results' labels."""
        reads = tuple(
            self._read(atom, tuple(mapping[label] for label in labels), labelling.whole)
            for atom, labels in zip(equation.operands, labelling.operands, strict=True)
        )
        results = tuple(
            tuple(mapping[label] for label in labels) for labels in labelling.results
        )
        elements = math.prod(equation.results[0].aval.shape) if equation.results else 1
        flops = labelling.task_flops({}) / max(1, elements)
        self._steps.append(Step(equation, reads, results, flops, labelling.block_params))
        for value, labels in zip(equation.results, results, strict=True):
            self._num_made += 1
            self._made[value, labels] = -self._num_made
        return results

    def _read(self, atom: Atom, labels: Labels, whole: bool) -> int:
        if (atom, labels) in self._made:
            return self._made[atom, labels]
        if isinstance(atom, Value) and atom in self._views and not whole:
            view = self._views[atom]
            labelling = self._labellings[view]
            self._add_step(view, labelling, self._adopt(labelling, labels))
            return self._made[atom, labels]
        return self._operands.setdefault((atom, labels), len(self._operands))

    def _slot(self, number: int) -> int:
        return number if number >= 0 else len(self._operands) - 1 - number
