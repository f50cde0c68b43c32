"""An output that stays in blocks where it was made, to be the next call's argument."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Blocks(dict[tuple[tuple[int, ...], tuple[int, ...]], Any]):
    """The blocks of an array; they may be dropped where nobody refers to this any more."""

    __slots__ = ("__weakref__",)


class Carried:
    """An array in blocks on devices; whoever looks at it gets it put together.

    The function whose output it is takes it back as it is. Everything else may use it as an
    array: NumPy, `jax.numpy`, functions under `jit`. It is unusable once it was carried into a
    call that succeeded, as an array is that `jit` donates.

    Attributes:
      aval: shape, dtype and weak type.
      blocks: by start and limit, as its owner knows them; None once it is unusable.
    """

    def __init__(
        self,
        aval: jax.ShapeDtypeStruct,
        blocks: Blocks,
        assemble: Callable[[Blocks], jax.Array],
    ) -> None:
        self.aval = aval
        self.blocks: Blocks | None = blocks
        self._assemble = assemble
        self._whole: jax.Array | None = None

    shape = property(lambda self: self.aval.shape)
    dtype = property(lambda self: self.aval.dtype)
    weak_type = property(lambda self: bool(self.aval.weak_type))
    ndim = property(lambda self: len(self.aval.shape))

    def whole(self) -> jax.Array:
        """Returns the array, put together where its first block is; once.

        Raises:
          ValueError: it was carried into another call.
          TaskError: a device that has a block of it is lost.
        """
        if self.blocks is None:
            raise ValueError(
                f"this {self.dtype}{list(self.shape)} was carried into another call, which "
                "took it; expected what that call returned in its place"
            )
        if self._whole is None:
            self._whole = self._assemble(self.blocks)
        return self._whole

    def is_deleted(self) -> bool:
        return self.blocks is None

    def delete(self) -> None:
        """Lets go of it; it is unusable from now on."""
        self.blocks = self._whole = None

    def block_until_ready(self) -> "Carried":
        """Returns itself: its blocks were there before it was."""
        return self

    def __repr__(self) -> str:
        state = ", carried into another call" if self.is_deleted() else ""
        return f"Carried({self.dtype}{list(self.shape)}{state})"

    def __jax_array__(self) -> jax.Array:
        return self.whole()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.whole(), dtype) if copy else np.asarray(self.whole(), dtype)

    def __reduce__(self) -> Any:  # copies and pickles are arrays
        return jnp.array, (np.asarray(self),)

    def __len__(self) -> int:
        return len(self.whole())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole(), name)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Carried, *operands: Any) -> Any:
        found = getattr(self.whole(), name)
        return found(*(o.whole() if isinstance(o, Carried) else o for o in operands))

    return method


_OPERATORS = """
    add sub mul truediv floordiv mod pow matmul and or xor lshift rshift
    radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor
    neg pos abs invert bool int float complex index iter getitem lt le gt ge eq ne
"""
for _name in _OPERATORS.split():
    setattr(Carried, f"__{_name}__", _forwarded(f"__{_name}__"))

with contextlib.suppress(ImportError):  # without these `jit` asks for `jnp.asarray` first
    from jax._src.core import pytype_aval_mappings
    from jax.interpreters.xla import canonicalize_dtype_handlers

    canonicalize_dtype_handlers[Carried] = Carried.whole
    pytype_aval_mappings[Carried] = lambda array: jax.core.ShapedArray(
        array.shape, array.dtype, weak_type=array.weak_type
    )
