"""Where in the user's code things come from, and errors that say so."""

import dataclasses
import pathlib
import re
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from doppler_jax.programs.rules import sub_jaxprs

# Files that call the user's functions, but are no part of them.
_CALLERS = tuple(
    str(pathlib.Path(__file__).with_name(f)) for f in ("provenance.py", "trace.py")
)
for _path in _CALLERS:
    source_info_util.register_exclusion(_path)

_JAX = str(pathlib.Path(jax.__file__).parent)

_REFUSALS = {
    "IOEffect": "calls the host, and tasks cannot promise to do so once and in order",
    "OrderedDebugEffect": "prints in order, which tasks on several devices do not have",
}
"""Why an effect is refused, by the name of its class."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an equation comes from."""

    source: str  # "file.py:12:4 (fn)"
    scope: str = ""  # named scopes and functions around it, "attn/qk"
    is_final: bool = False  # True: equations inside come from here too

    @classmethod
    def here(cls) -> "Place":
        """Returns the user's line that called this package."""
        return cls(source_info_util.summarize(source_info_util.current()) or "an unknown line")

    def of(self, eqn: JaxprEqn) -> "Place":
        """Returns the place of an equation that is called from here."""
        if self.is_final:
            return self
        # Inside a library function an equation has no line of the user's own.
        source = source_info_util.summarize(eqn.source_info)
        scope = _join(self.scope, _clean(str(eqn.source_info.name_stack)))
        return Place(source or self.source, scope or _function_name(source))

    def inside(self, name: str) -> "Place":
        """Returns the place inside a function `name` that is called from here."""
        is_public = name and not name.startswith(("_", "<"))
        return dataclasses.replace(self, scope=_join(self.scope, name if is_public else ""))


def make_jaxpr(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[ClosedJaxpr, Any]:
    """Returns the jaxpr of a function and the shapes of its results.

    Raises:
      ValueError: a shape, or what Python does, depends on an array's values.
    """
    try:
        made = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        if uses_references(made[0].jaxpr):
            # What a function does to references of its own is one pure call.
            made = jax.make_jaxpr(jax.jit(fn), return_shape=True)(*args, **kwargs)
    except (TypeError, IndexError) as error:
        # A shape that depends on values is a plain TypeError, known by its text alone.
        known = isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError)
        if not known and "concrete value" not in str(error):
            raise
        line = _user_line(error.__traceback__)
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"cannot trace {line}: it depends on an array's values: {first}"
        ) from error
    return made


def prints(eqn: JaxprEqn) -> bool:
    """True if an equation does something that is seen even if nobody reads its results."""
    return any(type(effect).__name__ == "DebugEffect" for effect in eqn.effects)


def uses_references(jaxpr: Jaxpr) -> bool:
    """True if a function makes mutable references; it can then only run as a whole."""
    return any(eqn.primitive.name == "new_ref" for eqn in jaxpr.eqns)


def check_effects(eqn: JaxprEqn, place: Place) -> None:
    """Raises `ValueError` if an equation does more to the world than to print, unordered."""
    for effect in eqn.effects:
        kind = type(effect).__name__
        if kind in ("DebugEffect", "InternalMutableArrayEffect"):
            continue
        inner, source = _find_effect(eqn, effect, place.source)
        reason = _REFUSALS.get(kind.replace("OrderedIO", "IO"), f"has the effect {effect}")
        raise ValueError(
            f"{inner.primitive.name} at {source} has a side effect: it {reason}; expected a "
            "pure function, which may print with jax.debug.print"
        )


def check_one_device(eqn: JaxprEqn, place: Place) -> None:
    """Raises `ValueError` if an equation, or one within, runs on the devices of a mesh."""
    if eqn.primitive.name in ("shard_map", "xla_pmap"):
        raise ValueError(
            f"{eqn.primitive.name} at {place.source} runs on all devices of a mesh, and a task "
            "on one device; expected a function without shard_map or pmap: dj.partition cuts"
        )
    for jaxpr in sub_jaxprs(eqn.params):
        for inner in jaxpr.eqns:
            check_one_device(inner, place.of(inner))


def check_no_mesh() -> None:
    """Raises `ValueError` where a mesh is set, to whose devices JAX would hold each task."""
    if not jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            "a mesh is set by jax.set_mesh, and a task runs on one device; expected none while "
            "a program is traced, compiled and called"
        )


def _find_effect(eqn: JaxprEqn, effect: Any, source: str) -> tuple[JaxprEqn, str]:
    """Returns the innermost equation that has the effect, and its line."""
    for jaxpr in sub_jaxprs(eqn.params):
        for inner in jaxpr.eqns:
            if effect in inner.effects:
                line = source_info_util.summarize(inner.source_info) or source
                return _find_effect(inner, effect, line)
    return eqn, source


def _user_line(found: TracebackType | None) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(found)
        if not frame.filename.startswith((*_CALLERS, _JAX))
    ]
    if not frames:
        return "an unknown line"
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})"


def _clean(stack: str) -> str:
    """Drops what differentiation and batching write around names; `transpose` stays."""
    while (found := re.sub(r"(?:jvp|vmap)\(([^()]*)\)", r"\1", stack)) != stack:
        stack = found
    return stack.replace("transpose()", "transpose").strip("/")


def _function_name(source: str) -> str:
    """Returns `fn` of "file.py:12:4 (outer.<locals>.fn)"; nothing for a lambda."""
    name = source.rpartition("(")[2].rstrip(")").rpartition(".")[2] if "(" in source else ""
    return "" if name.startswith("<") else name


def _join(outer: str, inner: str) -> str:
    return "/".join(part for part in (outer, inner) if part)
