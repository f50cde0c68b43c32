"""Code that Numba compiles: how, which modules hold it, and where what it became is kept.

Compiled code is kept in the user's cache folder (`doppler_jax.caches`), even if that is `off`,
or in `NUMBA_CACHE_DIR` if that is set, under a name that says what it was made of. Numba alone
notices a change of the file that a function is in, but not of one from which it calls; here a
change of any source, of Numba, of Python or of the processor leads to another folder.
`python -m doppler_jax.native` compiles all.

A new module of compiled code is added to `MODULES` and has a function `warm`, which calls what
it compiles once, with arguments of the types that it is called with.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from doppler_jax.caches import default_folder, user_folder

try:
    import fcntl
except ImportError:  # not Unix: two processes may compile the same
    fcntl = None  # type: ignore[assignment]

MODULES = (
    "doppler_jax.simulator.native_kernels",
    "doppler_jax.simulator.memory_kernels",
    "doppler_jax.search.kernels",
    "doppler_jax.search.lns_kernels",
)
"""All modules of compiled code."""

KEPT = 8
"""Folders that are kept: several versions and checkouts may be in use beside each other."""


def jit(function: Callable[..., Any]) -> Any:
    """Compiles a function of a native module at its first call; releases the GIL.

    It computes as Python does: without fast-math, sums keep their order. It cannot allocate
    arrays, so that no references are counted: half of the time to compile would go there.
    """
    return _compiled(function)


def inner(function: Callable[..., Any]) -> Any:
    """Compiles, in less time, a function that only compiled code calls."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inlined(function: Callable[..., Any]) -> Any:
    """Does what `inner` does, and copies the function into those that call it."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    import numba

    options |= {"nogil": True, "_nrt": False}
    compiled: Any = numba.njit(**options)(function)
    if (folder := _writable_folder()) is not None:
        compiled._cache = _make_cache(function, folder)
    return compiled


def is_compiled() -> bool:
    """Returns whether all compiled code is there for these sources; does not load Numba."""
    return (cache_folder() / "complete").exists()


def compile_all() -> None:
    """Compiles what is not compiled yet, and notes that it is done; one process at a time.

    The last module is compiled in another process, beside the first ones: they are as long.
    """
    folder = _writable_folder()
    with contextlib.ExitStack() as stack:
        if folder is not None and fcntl is not None:
            fcntl.flock(stack.enter_context((folder / "lock").open("w")), fcntl.LOCK_EX)
        if not is_compiled():
            beside = folder and _start(f"from {MODULES[-1]} import warm; warm()")
            for name in MODULES:
                if beside and name == MODULES[-1]:
                    beside.wait()  # what it has not done is done here
                importlib.import_module(name).warm()
        if folder is not None:
            (folder / "complete").touch()


def wait_until_compiled(deadline_s: float | None) -> bool:
    """Returns whether all is compiled, or could be by `deadline_s` of `time.monotonic()`.

    With a deadline it is compiled in a process that outlives this one: what is cut off would
    have to be begun again. Where nothing can be kept, it is compiled here.
    """
    if is_compiled() or deadline_s is None or _writable_folder() is None:
        return True
    _start("from doppler_jax import native; native.compile_all()")
    while not is_compiled():
        if time.monotonic() > deadline_s - 0.05:
            return False
        time.sleep(0.05)
    return True


@functools.cache
def _start(program: str) -> subprocess.Popen:
    """Starts a process of a Python program, which outlives this one."""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@functools.cache
def cache_folder() -> pathlib.Path:
    """Returns the folder of what is compiled, which may not exist yet."""
    made_of = hashlib.sha256()
    here = pathlib.Path(__file__)
    for name in MODULES:
        made_of.update((here.parents[2] / f"{name.replace('.', '/')}.py").read_bytes())
    made_of.update(here.read_bytes())
    python = f"{sys.implementation.cache_tag}{sys.abiflags}"
    for version in (python, importlib.metadata.version("numba"), processor()):
        made_of.update(version.encode())
    told = os.environ.get("NUMBA_CACHE_DIR")
    home = pathlib.Path(told, "doppler_jax") if told else user_folder() or default_folder()
    return home / f"native-{made_of.hexdigest()}"


def processor() -> str:
    """Returns what tells this machine's processor from another that shares its folders."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    known = dict(line.split("\t", 1) for line in reversed(lines) if "\t" in line)
    return str([platform.machine(), known.get("model name"), known.get("flags")])


@functools.cache
def _writable_folder() -> pathlib.Path | None:
    """Returns the folder, made and marked as used now; None if nothing can be kept."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "used").touch()
        used = sorted(
            folder.parent.glob("native-*/used"), key=lambda path: path.stat().st_mtime
        )
    except OSError as error:
        print(f"doppler_jax compiles its simulator in every process: {error}", file=sys.stderr)
        return None
    for path in used[:-KEPT]:
        shutil.rmtree(path.parent, ignore_errors=True)
    return folder


def _make_cache(function: Callable[..., Any], folder: pathlib.Path) -> Any:
    """Returns Numba's cache of a function, in the folder."""
    from numba.core import caching

    class Locator(caching._CacheLocator):
        def get_cache_path(self) -> str:
            return str(folder)

        def get_source_stamp(self) -> str:
            return folder.name

        def get_disambiguator(self) -> str:
            return f"{function.__module__}-{function.__code__.co_firstlineno}"

        @classmethod
        def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "Locator":
            return cls()

    class Implementation(caching.CompileResultCacheImpl):
        def __init__(self, py_func: Callable[..., Any]) -> None:
            self._locator_classes: Any = [Locator]
            super().__init__(py_func)

    class Cache(caching.FunctionCache):
        _impl_class = Implementation

    return Cache(function)
