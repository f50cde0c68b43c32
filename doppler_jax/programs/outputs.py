"""An output of a call that may still run, and whose blocks may stay where they were made."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np


class Blocks(dict[tuple[tuple[int, ...], tuple[int, ...]], Any]):
    """The blocks of an array; they may be dropped where nobody refers to this any more."""

    __slots__ = ("__weakref__",)


class Pending(Protocol):
    """A call, as its outputs know it."""

    def finish(self) -> None:
        """Waits for its end; raises the error by which it failed, however often it is asked."""

    def check(self) -> None:
        """Raises the error by which it failed, if it is known by now."""

    def is_ready(self) -> bool:
        """Returns whether it has ended; waits for nothing."""


class Output(jax.Array):
    """An array that a call makes; whoever looks at it waits for the call.

    It is a `jax.Array` to NumPy, `jax.numpy`, functions under `jit` and who asks `isinstance`.
    What is carried stays in blocks on devices, and is put together when it is looked at; the
    function whose output it is takes it back as it is. From then on it is unusable, as an
    array is that `jit` donates, unless that call fails.

    Args:
      aval: shape, dtype and weak type.
      call: which makes it.
      assemble: puts blocks together.
      blocks: by start and limit, as its owner knows them; None where it does not stay.
    """

    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100  # NumPy's operators leave it to ours

    def __init__(
        self,
        aval: jax.core.ShapedArray,
        call: Pending,
        assemble: Callable[[Blocks], jax.Array],
        blocks: Blocks | None = None,
    ) -> None:
        self._aval = aval
        self.blocks = blocks
        self._call: Pending | None = call
        self._assemble = assemble
        self._whole: jax.Array | None = None
        self._is_taken = False

    aval: Any = property(lambda self: self._aval)
    shape: Any = property(lambda self: self.aval.shape)
    dtype: Any = property(lambda self: self.aval.dtype)
    weak_type = property(lambda self: bool(self.aval.weak_type))
    ndim: Any = property(lambda self: self.aval.ndim)
    size: Any = property(lambda self: self.aval.size)

    def whole(self) -> jax.Array:
        """Returns the array, put together where its first block is; once.

        Raises:
          ValueError: it was carried into another call.
          TaskError: its call failed, or a device that has a block of it is lost.
        """
        self.check()
        self.finish()
        if self._whole is None:
            assert self.blocks is not None
            self._whole = self._assemble(self.blocks)
        return self._whole

    def check(self) -> None:
        """Raises what `whole` would, as far as it is known by now."""
        if self._call is not None:
            self._call.check()
        if self._is_taken:
            raise ValueError(
                f"this {self.dtype}{list(self.shape)} was carried into another call, which "
                "took it; expected what that call returned in its place"
            )

    def finish(self) -> None:
        """Waits for its call, and raises the error by which that failed."""
        if self._call is not None:
            self._call.finish()

    def made(self, whole: jax.Array | None) -> None:
        """Tells that its call has ended well, and the array if it does not stay in blocks."""
        self._whole, self._call = whole, None

    def lend(self) -> None:
        """Makes it unusable."""
        self._is_taken = True

    def give_back(self) -> None:
        """Makes it usable again."""
        self._is_taken = False

    def is_deleted(self) -> bool:
        is_gone = self._whole is not None and self._whole.is_deleted()
        return self._is_taken or is_gone

    def delete(self) -> None:
        """Lets go of it; it is unusable from now on."""
        self.lend()
        self.blocks = self._whole = None

    def is_ready(self) -> bool:
        """Returns whether its call has ended."""
        return self._call is None or self._call.is_ready()

    def block_until_ready(self) -> "Output":
        """Waits for its call; what stays on the devices is left there."""
        if not self._is_taken:
            self.finish()
        return self

    def __repr__(self) -> str:
        if self.is_deleted():
            return f"Output({self.dtype}{list(self.shape)}, carried into another call)"
        return repr(self.whole())

    def __jax_array__(self) -> jax.Array:
        return self.whole()

    def __array__(
        self, dtype: Any = None, context: None = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.array(self.whole(), dtype) if copy else np.asarray(self.whole(), dtype)

    def __reduce__(self) -> Any:  # copies and pickles are arrays
        return jnp.array, (np.asarray(self),)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole(), name)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Output, *operands: Any) -> Any:
        found = getattr(self.whole(), name)
        return found(*(o.whole() if isinstance(o, Output) else o for o in operands))

    return method


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self.whole(), name))


_OPERATORS = """
    add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift
    radd rsub rmul rtruediv rfloordiv rmod rdivmod rpow rmatmul rand ror rxor rlshift rrshift
    neg pos abs invert bool int float complex index round iter getitem lt le gt ge eq ne
    len contains copy deepcopy format str dlpack dlpack_device array_namespace
"""
for _name in _OPERATORS.split():
    setattr(Output, f"__{_name}__", _operator(f"__{_name}__"))
for _name in dir(jax.Array):  # which has them all, without content
    if not _name.startswith("__") and _name not in vars(Output):
        setattr(Output, _name, _attribute(_name))

with contextlib.suppress(ImportError):  # without these `jit` asks for `jnp.asarray` first
    from jax._src.core import pytype_aval_mappings
    from jax._src.tree_util import dispatch_registry
    from jax.interpreters.xla import canonicalize_dtype_handlers

    canonicalize_dtype_handlers[Output] = Output.whole
    pytype_aval_mappings[Output] = lambda array: array.aval
    # For `jax.device_get` of random keys.
    dispatch_registry.register_node(
        Output, lambda array: ((array.whole(),), None), lambda _, wholes: wholes[0]
    )
