"""What Numba compiles is kept, and known to be of these sources."""

import os
import pathlib
import subprocess
import sys

import pytest

from doppler_jax import native

PROGRAM = """
import sys
from pkg import native
native.MODULES = ("pkg.first", "pkg.second")
before = native.is_compiled(), "numba" in sys.modules
native.compile_all()
from pkg import first
print(*before, first.probe(3), sum(first.probe.stats.cache_hits.values()), native.is_compiled())
"""

FIRST = """
from pkg.native import jit
from pkg.second import times

@jit
def probe(x):
    return times(x) + 1

def warm():
    probe(3)
"""

SECOND = """
from pkg.native import inlined, jit

@{kind}
def times(x):
    return {factor} * x

def warm():
    pass
"""


@pytest.fixture
def run(tmp_path):
    """Runs the program in a new process, on the modules with a factor; returns what it says."""
    folder = tmp_path / "pkg"
    (folder / "native").mkdir(parents=True)
    source = pathlib.Path(native.__file__).read_bytes()
    (folder / "native" / "__init__.py").write_bytes(source)
    (folder / "first.py").write_text(FIRST)

    def run(factor, kind="jit", home=tmp_path / "home"):
        (folder / "second.py").write_text(SECOND.format(factor=factor, kind=kind))
        os.utime(folder / "second.py", (1e9, 1e9))  # times say nothing
        environment = dict(os.environ, NUMBA_CACHE_DIR=str(home), PYTHONDONTWRITEBYTECODE="1")
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, "-c", PROGRAM], check=True, **options)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jit", "inlined"])
def test_a_changed_source_of_another_module_is_compiled_anew(run, kind):
    found = [run(factor, kind).stdout.split() for factor in (2, 2, 5, 2)]
    new, kept = ["False", "False"], ["True", "False"]  # is_compiled, before Numba is loaded
    again = [*kept, "7", "1", "True"]
    assert found == [[*new, "7", "0", "True"], again, [*new, "16", "0", "True"], again]


def test_where_nothing_can_be_kept_one_line_says_so(run, tmp_path):
    (tmp_path / "file").touch()
    for _ in range(2):
        done = run(2, home=tmp_path / "file")
        assert done.stdout.split() == ["False", "False", "7", "0", "False"]
        assert done.stderr.count("\n") == 1
        assert "compiles its simulator in every process" in done.stderr


def test_old_folders_go_and_those_in_use_stay(run, tmp_path):
    first = run(1, "inlined").stdout
    (folder,) = (tmp_path / "home" / "doppler_jax").iterdir()
    for k in range(native.KEPT):
        older = folder.with_name(f"native-{k}")
        older.mkdir()
        (older / "used").touch()
        os.utime(older / "used", (k, k))
    assert run(1, "inlined").stdout != first
    left = sorted(path.name for path in folder.parent.iterdir())
    assert left == sorted([folder.name, *(f"native-{k}" for k in range(1, native.KEPT))])


def test_all_native_modules_are_known():
    root = pathlib.Path(native.__file__).parents[1]
    users = {
        f"doppler_jax.{'.'.join(path.relative_to(root).with_suffix('').parts)}"
        for path in root.rglob("*.py")
        if "doppler_jax.native import" in (text := path.read_text()) and "jit" in text
    }
    assert users == set(native.MODULES)
