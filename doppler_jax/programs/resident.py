"""Which arguments lie on the devices before a call, by the names that the user gives."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from doppler_jax.programs.blocks import leaf_name

Resident = int | str | Sequence[int | str] | None
"""Positions, names or pytree paths of arguments; None stands for all of them."""


def resident_leaves(
    fn: Callable[..., Any], paths: Sequence[tuple[Any, ...]], resident: Resident
) -> tuple[bool, ...]:
    """Returns whether each leaf of `(args, kwargs)` is resident.

    Args:
      fn: the function, whose parameters' names stand for positional arguments.
      paths: the key path of each leaf.
      resident: see `trace`.

    Raises:
      ValueError: an entry is neither an integer nor a string, or no leaf is called so.
    """
    if resident is None:
        return (True,) * len(paths)
    several = isinstance(resident, Sequence) and not isinstance(resident, str)
    entries = cast(Sequence[object], resident) if several else (resident,)
    parameters = _positional_parameters(fn)
    leaves = [_names(path, parameters) for path in paths]
    chosen = [False] * len(leaves)
    for entry in entries:
        path = _path(entry)
        matched = [any(_is_prefix(path, name) for name in names) for names in leaves]
        if not any(matched):
            raise ValueError(
                f"resident holds {entry!r}, but no array of the arguments is called so or is "
                f"part of it; there are: {_listed([names[-1] for names in leaves])}"
            )
        chosen = [a or b for a, b in zip(chosen, matched, strict=True)]
    return tuple(chosen)


def _listed(names: list[str], most: int = 12) -> str:
    rest = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *rest]) or "none"


def _path(entry: object) -> str:
    if isinstance(entry, bool) or not isinstance(entry, int | str):
        raise ValueError(
            f"resident holds {entry!r}; expected positions, names or paths of arguments, "
            "such as 0, 'params' or \"args[0]['w']\""
        )
    return f"args[{entry}]" if isinstance(entry, int) else entry


def _is_prefix(path: str, name: str) -> bool:
    return name == path or (name.startswith(path) and name[len(path)] in "[.")


def _names(path: tuple[Any, ...], parameters: list[str]) -> list[str]:
    """Returns what a leaf may be called: by its parameter's name, and as errors write it."""
    name = leaf_name(path)
    position = path[1].idx if path[0].idx == 0 else len(parameters)
    if position < len(parameters):
        prefix = f"args[{position}]"
        return [parameters[position] + name.removeprefix(prefix), name]
    return [name]


def _positional_parameters(fn: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that take positional arguments, "" for `args`."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some callables, such as builtins, have none
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # "args[0]" is the first argument, also where a parameter is called `args`.
    return [p.name if p.name != "args" else "" for p in parameters if p.kind in by_position]
