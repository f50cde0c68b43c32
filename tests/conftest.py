"""Strict defaults for every test, and the graphs that many of them share."""

import os
import pathlib
import signal

from doppler_jax.caches import default_folder

os.environ.setdefault("MPLBACKEND", "Agg")
# Tests want several devices, of which a machine with a GPU may have one; see `make test-gpu`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("EQX_ON_ERROR", "nan")  # what it raises it raises by a callback
# What one process of a run has compiled, the others take: workers, and what tests start.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache/jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# Tests that name another cache folder take the native code that is there.
os.environ.setdefault("NUMBA_CACHE_DIR", str(default_folder().parent))
# Tests compile much and run little; what they start does likewise. So XLA optimises little,
# unless the caller's flags say otherwise.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import chex
import jax
import pytest

from doppler_jax import memory_maps, native

# What a shell runs in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any test starts the backend: several host devices, and nothing implicit.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture(scope="session", autouse=True)
def _all_native_code_is_compiled():
    """By one worker; what bounds seconds would give up before it is."""
    native.compile_all()


@pytest.fixture(scope="module", autouse=True)
def _traces_are_counted_afresh():
    """What files before have traced may have been dropped, and is traced again.

    Near the bound on memory maps it is dropped here, before `place` does so within a file.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_maps, "SHARE", memory_maps.SHARE / 2)
        memory_maps.free_memory_maps()
    chex.clear_trace_counter()


def pytest_runtest_setup(item):
    """A test marked `gpu` is skipped where there is none."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU, and JAX_PLATFORMS=cuda,cpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Where DOPPLER_REQUIRE_SHARED is set, a test of the published graphs must not skip."""
    report = yield
    wants_shared = {"reference_graphs", "neutral_graphs"} & set(item.fixturenames)
    if wants_shared and report.skipped and "DOPPLER_REQUIRE_SHARED" in os.environ:
        report.outcome, report.longrepr = "failed", f"must not skip: {report.longrepr}"
    return report


SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def reference_graphs() -> pathlib.Path:
    """Folder of the published DOPPLER graphs, which the project's tree does not hold."""
    folder = SHARED / "reference_graphs"
    if not folder.is_dir():
        pytest.skip("published graphs absent: ../shared/reference_graphs")
    return folder


@pytest.fixture(scope="session")
def neutral_graphs() -> pathlib.Path:
    """Folder of task graphs from other projects, likewise."""
    folder = SHARED / "neutral_graphs"
    if not folder.is_dir():
        pytest.skip("neutral graphs absent: ../shared/neutral_graphs")
    return folder
