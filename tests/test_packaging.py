"""What an installation contains, and that it lives beside Hugging Face's `kernels`."""

import ast
import os
import pathlib
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DATA = PYPROJECT["tool"]["setuptools"]["package-dir"]


def list_sources():
    """Returns our Python files relative to the root, the engine's by its link."""
    folders = os.walk(ROOT / "doppler_jax", followlinks=True)
    files = (pathlib.Path(folder, name) for folder, _, names in folders for name in names)
    return sorted(path.relative_to(ROOT) for path in files if path.suffix == ".py")


def test_every_package_folder_is_listed_regular_and_typed():
    assert os.readlink(ROOT / "doppler_jax" / "engine") == "../kernels"
    assert pathlib.Path("doppler_jax/engine/__init__.py") in list_sources()
    expected = {".".join(path.parent.parts) for path in list_sources()}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == expected | DATA.keys()
    # A folder without __init__.py would be a namespace, which loses to any regular package.
    for path in list_sources():
        assert (ROOT / path.parent / "__init__.py").exists(), path
    assert (ROOT / "doppler_jax" / "py.typed").exists()


def test_installed_code_does_not_import_the_name_kernels():
    # That name belongs to Hugging Face; the engine imports itself relatively.
    for path in list_sources():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                assert name.split(".")[0] != "kernels", f"{path}:{node.lineno}"


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-newest.txt"])
def test_constraints_pin_every_dependency(file):
    lines = (ROOT / file).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    assert len(versions) == len(pins)
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(text for extra in extras for text in extra)]:
        need = Requirement(text)
        version = versions[canonicalize_name(need.name)].removeprefix("==")
        assert need.specifier.contains(version, prereleases=True), f"{text} against {version}"


def run_python(*args, cwd, path="", python=sys.executable, fails=False):
    """Returns what the command prints; `path` becomes PYTHONPATH."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [python, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return (done.stderr if fails else done.stdout).strip()


def test_the_root_gives_way_to_another_kernels_or_says_what_the_engine_is_called(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("from .hub import get_kernel")
    (tmp_path / "kernels" / "hub.py").write_text("def get_kernel(): return 'theirs'")
    show = "import kernels; print(kernels.get_kernel(), kernels.__path__)"
    printed = run_python("-c", show, cwd=ROOT, path=tmp_path).split()
    assert printed[:2] == ["theirs", f"['{tmp_path / 'kernels'}']"]
    error = run_python("-c", "import kernels", cwd=ROOT, fails=True)
    assert error.endswith("the engine is imported as doppler_jax.engine")
    show = (
        "try: import kernels\nexcept ImportError: import sys; print('kernels' in sys.modules)"
    )
    assert run_python("-c", show, cwd=ROOT) == "False"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What is built from, elsewhere: building leaves files beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "checkpoints", "kernels"):
        (source / name).symlink_to(ROOT / name)
    (source / "doppler_jax").symlink_to(ROOT / "doppler_jax")
    return source


def build(kind, source, folder):
    """Returns the file that the build back end makes."""
    make = f"import setuptools.build_meta as b; print(b.build_{kind}({str(folder)!r}))"
    return folder / run_python("-c", make, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def make_environment(folder, *what):
    """Returns the Python of a new environment with our dependencies and what is given."""
    run_python("-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = run_python(
        "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
        cwd=folder, python=python,
    )  # fmt: skip
    # Links of editable installations in there are not followed from here.
    (pathlib.Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = "-m", "pip", "--python", python, "install", "--ignore-installed", "--no-deps"
    run_python(*pip, "--no-build-isolation", "--no-index", *what, cwd=folder)
    return python


RUN = """
import jax
import numpy as np
import doppler_jax as dj
import doppler_jax.engine as engine

sharded = dj.partition(dj.trace(lambda x: x @ x, np.ones((4, 4), np.float32)), 2)
step = dj.compile(sharded, [0] * sharded.graph.num_tasks, devices=jax.devices())
print(step(np.ones((4, 4), np.float32))[0, 0], engine.__file__, dj.__file__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("editable", [True, False])
def test_an_installation_runs_a_program_from_any_folder(source, wheel, editable, tmp_path):
    what = ("--editable", source) if editable else (wheel,)
    python = make_environment(tmp_path / "venv", *what)
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(RUN)
    result, *files = run_python(script, cwd=script.parent, python=python).split()
    assert result == "4.0"
    where = ROOT if editable else tmp_path / "venv"
    for file, folder in zip(files, ("doppler_jax/engine", "doppler_jax"), strict=True):
        assert file.startswith(str(where))
        assert file.endswith(f"{folder}/__init__.py")
    show = "from doppler_jax.policy_files import load_base_policy as f; print(f().method)"
    assert run_python("-c", show, cwd=tmp_path, python=python) == "doppler"


@pytest.mark.slow
def test_wheel_and_source_distribution_have_every_file(source, wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
    (base,) = DATA.values()
    weights = [path for path in (ROOT / base).rglob("*") if path.is_file()]
    assert inside == {
        *map(str, list_sources()),
        "doppler_jax/py.typed",
        *(f"doppler_jax/base/{path.relative_to(ROOT / base)}" for path in weights),
    }
    packed = build("sdist", source, tmp_path)
    with tarfile.open(packed) as file:
        assert not [member.name for member in file if member.islnk() or member.issym()]
        file.extractall(tmp_path, filter="data")
    again = build("wheel", packed.with_name(packed.name.removesuffix(".tar.gz")), tmp_path)
    with zipfile.ZipFile(again) as file:
        assert inside == {name for name in file.namelist() if ".dist-info/" not in name}
