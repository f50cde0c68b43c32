"""Which arguments of a function stay on the devices: by position, name or path.

Resident ones lie where they are read; carried ones are what the call before made of them.
"""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Resident = int | str | Sequence[int | str] | None
"""Positions, names or pytree paths of arguments; None stands for all of them."""

Carry = int | str | Sequence[int | str] | Mapping[int | str, int | str] | None
"""Likewise; or the output that each becomes, by position or path (`"out[0]['w']"`)."""

Pairs = tuple[tuple[int, int], ...]
"""Of flat arguments, and the flat outputs that take their place in the next call."""

Named = dict[str, Any]
"""Trees whose leaves are positions among flat values, by name."""

_SHOWN = 12  # names in a message


def name_arguments(in_tree: Any, parameters: Sequence[str]) -> Named:
    """Returns all arguments and their parts by what they may be called.

    Args:
      in_tree: treedef of `(args, kwargs)`.
      parameters: names that stand for positional arguments.
    """
    args, kwargs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    named: Named = {}
    for name, tree in kwargs.items():
        named.update(_parts(tree, name))
    for position, tree in enumerate(args):
        # "args[0]" is the first argument, also where a parameter is called `args`.
        if position < len(parameters) and parameters[position] != "args":
            named.update(_parts(tree, parameters[position]))
    return {**named, **dict(_parts(args, "args"))}


def _parts(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields a tree and all trees in it, by name."""
    yield name, tree
    for path, part in _children(tree):
        yield from _parts(part, name + jax.tree_util.keystr(path))


def _children(tree: Any) -> list[tuple[Any, Any]]:
    """Returns what a tree consists of, each with its path; nothing for a leaf."""
    found = jax.tree.flatten_with_path(tree, is_leaf=lambda part: part is not tree)[0]
    return [(path, part) for path, part in found if path]


def resident_leaves(named: Named, resident: Resident) -> tuple[bool, ...]:
    """Returns whether each leaf of the arguments is resident.

    Args:
      named: the arguments.
      resident: see `trace`.

    Raises:
      ValueError: an entry is neither an integer nor a string, or no leaf is called so.
    """
    count = len(leaf_names(named))
    if resident is None:
        return (True,) * count
    entries = _entries(resident)
    chosen = {i for e in entries for i in jax.tree.leaves(_find(named, e, "resident")[1])}
    return tuple(i in chosen for i in range(count))


def leaf_names(named: Named) -> list[str]:
    """Returns the name of each leaf, as errors write it."""
    names = {tree: name for name, tree in named.items() if isinstance(tree, int)}
    return [names[i] for i in range(len(names))]


def _entries(given: Any) -> tuple[Any, ...]:
    several = isinstance(given, Sequence) and not isinstance(given, str)
    return tuple(given) if several else (given,)


def _find(named: Named, entry: object, option: str) -> tuple[str, Any]:
    """Returns the argument that an entry of an option names, and its name."""
    if isinstance(entry, bool) or not isinstance(entry, int | str):
        raise ValueError(
            f"{option} names {entry!r}; expected positions, names or paths of arguments, "
            "such as 0, 'params' or \"args[0]['w']\""
        )
    path = f"args[{entry}]" if isinstance(entry, int) else entry
    if not jax.tree.leaves(named.get(path)):
        raise ValueError(
            f"{option} names {entry!r}, but no array of the arguments is called so or is "
            f"part of it; there are: {_some(leaf_names(named))}"
        )
    return path, named[path]


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    more = [f"and {rest} more"] if rest > 0 else []
    return ", ".join([*names[:_SHOWN], *more]) or "none"


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a function takes and returns: trees of positions by name, and what is there."""

    arguments: Named
    arg_avals: Sequence[jax.ShapeDtypeStruct]
    outputs: Named  # "out" and its parts
    out_avals: Sequence[jax.ShapeDtypeStruct]

    def carried(self, carry: Carry) -> Pairs:
        """Returns which arguments are carried, and in which outputs, by flat position.

        Args:
          carry: see `trace`.

        Raises:
          ValueError: an entry names no argument or output, an output is not like its argument,
            there is none like it or there are several, or something is carried twice.
        """
        if carry is None:
            return ()
        wanted = carry if isinstance(carry, Mapping) else dict.fromkeys(_entries(carry))
        pairs: list[tuple[int, int]] = []
        for entry, target in wanted.items():
            argument = _find(self.arguments, entry, "carry")
            given = target is not None
            output = self._output(entry, target) if given else self._only_like(entry, argument)
            if why := self._unlike(argument, output):
                raise ValueError(
                    f"carry pairs {entry!r} with {output[0]}, but {why}; expected trees of the "
                    "same shapes, dtypes and weak types"
                )
            leaves = map(jax.tree.leaves, (argument[1], output[1]))
            pairs += zip(*leaves, strict=True)
        for side, named in enumerate((self.arguments, self.outputs)):
            counts = Counter(pair[side] for pair in pairs)
            for i in (i for i, count in counts.items() if count > 1):
                raise ValueError(f"carry names {leaf_names(named)[i]} twice")
        return tuple(pairs)

    def _output(self, entry: object, target: object) -> tuple[str, Any]:
        """Returns the output at a position or path, and its name."""
        name = target
        if isinstance(target, int) and not isinstance(target, bool):
            parts = _children(self.outputs["out"])
            inside = 0 <= target < len(parts)
            name = f"out{jax.tree_util.keystr(parts[target][0])}" if inside else None
        if not isinstance(name, str) or name not in self.outputs:
            raise ValueError(
                f"carry pairs {entry!r} with {target!r}; expected the position or the path of "
                f"an output, as they are: {_some(leaf_names(self.outputs))}"
            )
        return name, self.outputs[name]

    def _only_like(self, entry: object, argument: tuple[str, Any]) -> tuple[str, Any]:
        """Returns the one output that can take an argument's place: all of it, or a part."""
        whole = self.outputs["out"]
        paths = ["", *(jax.tree_util.keystr(path) for path, _ in _children(whole))]
        outputs = [(f"out{path}", self.outputs[f"out{path}"]) for path in paths]
        differences = [self._unlike(argument, output) for output in outputs]
        found = [o for o, why in zip(outputs, differences, strict=True) if not why]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"carry names {entry!r}, which {' and '.join(name for name, _ in found)} are "
                f"like; expected a mapping that says which, such as {{{entry!r}: 0}}"
            )
        tried = "; ".join(sorted(differences, key=lambda why: "tree" in why)[:3])
        raise ValueError(
            f"carry names {entry!r}, but no output is like it: {tried}; expected one of the "
            "same tree, shapes, dtypes and weak types"
        )

    def _unlike(self, argument: tuple[str, Any], output: tuple[str, Any]) -> str:
        """Returns how an output differs from an argument, "" if it can take its place."""
        tree: Any = jax.tree.structure(argument[1])
        if tree != jax.tree.structure(output[1]):
            return f"{output[0]} has another tree than {argument[0]}"
        names = leaf_names(self.arguments), leaf_names(self.outputs)
        for i, o in zip(*map(jax.tree.leaves, (argument[1], output[1])), strict=True):
            kinds = _kind(self.arg_avals[i]), _kind(self.out_avals[o])
            if kinds[0] != kinds[1]:
                return f"{names[1][o]} is {kinds[1]} where {names[0][i]} is {kinds[0]}"
        return ""


def name_outputs(out_tree: Any) -> Named:
    """Returns all outputs and their parts by what they may be called."""
    return dict(_parts(jax.tree.unflatten(out_tree, range(out_tree.num_leaves)), "out"))


def _kind(aval: jax.ShapeDtypeStruct) -> str:
    weak = ", of a weak type" if aval.weak_type else ""
    return f"{aval.dtype}{list(aval.shape)}{weak}"


def same_arrays(leaves: Sequence[Any], kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """Returns per argument the first one that is the same array, and of the same kind."""
    first: dict[tuple[int, Hashable], int] = {}
    return tuple(
        first.setdefault((id(leaf), kind), i)
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim
        else i
        for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))
    )
