"""What an installation contains, and that it lives beside Hugging Face's `kernels`."""

import ast
import csv
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PYPROJECT["tool"]["setuptools"]["package-dir"]
DATA = {"doppler_jax.base": FOLDERS["doppler_jax.base"]}
MAPPING = {name: folder for name, folder in FOLDERS.items() if name not in DATA}


def test_every_package_folder_is_listed():
    expected = {
        ".".join((name, *path.parent.relative_to(ROOT / folder).parts))
        for name, folder in MAPPING.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == expected | DATA.keys()


@pytest.mark.parametrize("folder", MAPPING.values())
def test_every_package_folder_is_a_regular_package(folder):
    # A folder without __init__.py would be a namespace, which loses to any regular package.
    for path in (ROOT / folder).rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path


def test_packages_declare_their_types():
    assert [
        folder for folder in MAPPING.values() if not (ROOT / folder / "py.typed").exists()
    ] == []


@pytest.mark.parametrize("folder", MAPPING.values())
def test_installed_code_does_not_import_the_name_kernels(folder):
    # Installed, that name belongs to Hugging Face; the engine imports itself relatively.
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert name.split(".")[0] not in {"kernels", "doppler_kernels"}, where


def test_constraints_pin_every_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    assert len(versions) == len(pins)
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(text for extra in extras for text in extra)]:
        need = Requirement(text)
        version = versions[canonicalize_name(need.name)].removeprefix("==")
        assert need.specifier.contains(version, prereleases=True), f"{text} against {version}"


def run_python(*args, cwd, path=""):
    """Returns what the command prints; `path` becomes PYTHONPATH."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def download_hugging_face_kernels(folder):
    command = "-m", "pip", "download", "--no-deps", "--dest", folder, "kernels"
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    return next(folder.glob("kernels-*"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which our wheel and Hugging Face's `kernels` are installed."""
    wheels = tmp_path_factory.mktemp("wheels")
    theirs = download_hugging_face_kernels(wheels)
    source = tmp_path_factory.mktemp("source")  # building leaves files beside the sources
    for name in ("pyproject.toml", "README.md", "LICENSE", "checkpoints", *MAPPING.values()):
        (source / name).symlink_to(ROOT / name)
    pip = "-m", "pip"
    build = "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels
    run_python(*pip, *build, source, cwd=wheels)
    site = tmp_path_factory.mktemp("site")
    install = "install", "--no-deps", "--no-compile", "--target", site
    run_python(*pip, *install, next(wheels.glob("doppler_jax-*.whl")), theirs, cwd=wheels)
    return site


def read_record(site, distribution):
    (record,) = site.glob(f"{distribution}-*.dist-info/RECORD")
    with record.open(newline="") as file:
        return {row[0] for row in csv.reader(file)}


@pytest.mark.slow
def test_wheel_and_hugging_face_share_no_file(site):
    ours, theirs = read_record(site, "doppler_jax"), read_record(site, "kernels")
    assert "kernels/__init__.py" in theirs
    assert not ours & theirs
    for name, folder in MAPPING.items():
        files = (*(ROOT / folder).rglob("*.py"), ROOT / folder / "py.typed")
        expected = {f"{name}/{path.relative_to(ROOT / folder).as_posix()}" for path in files}
        found = {file for file in ours if file.startswith(f"{name}/")}
        assert expected == {file for file in found if not file.startswith("doppler_jax/base/")}


@pytest.mark.slow
def test_the_base_policy_is_installed(site, tmp_path):
    (folder,) = DATA.values()
    files = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*")}
    installed = site / "doppler_jax" / "base"
    assert files == {path.relative_to(installed) for path in installed.rglob("*")}
    show = "from doppler_jax.base_policy import load_base_policy as f; print(f().method)"
    assert run_python("-c", show, cwd=tmp_path, path=site) == "doppler"


@pytest.mark.slow
def test_installed_engine_is_doppler_kernels(site, tmp_path):
    show = (
        "import doppler_jax, doppler_kernels; from importlib.util import find_spec; "
        "print(doppler_jax.__file__, doppler_kernels.__file__, find_spec('kernels').origin)"
    )
    printed = run_python("-c", show, cwd=tmp_path, path=site).split()
    packages = "doppler_jax", "doppler_kernels", "kernels"
    assert printed == [str(site / package / "__init__.py") for package in packages]


@pytest.mark.slow
def test_checkout_comes_before_hugging_face(site, tmp_path):
    ours = str(ROOT / "kernels" / "__init__.py")
    show = "from importlib.util import find_spec; print(find_spec('kernels').origin)"
    assert run_python("-c", show, cwd=ROOT, path=site) == ours
    test = tmp_path / "test_origin.py"
    test.write_text(
        f"import kernels\n\ndef test_origin():\n    assert kernels.__file__ == {ours!r}\n"
    )
    # By way of the script, which unlike `python -m pytest` does not put the folder on the path.
    pytest_script = pathlib.Path(sys.executable).with_name("pytest")
    options = "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT
    printed = run_python(pytest_script, *options, test, cwd=tmp_path, path=site)
    assert "1 passed" in printed
