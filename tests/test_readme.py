"""What the documentation shows must run: its Python, its make targets, its modules."""

import importlib.util
import re
import shlex
import sys
import types

import pytest

import doppler_jax as dj
from tests.commands import ROOT, printed

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = {"bash", "console", "sh", "shell"}


def read_blocks(path, languages):
    """Returns (line before the block's first, text) of the fenced blocks in `languages`."""
    text = path.read_text()
    return [
        (text.count("\n", 0, match.start(2)), match[2])
        for match in FENCE.finditer(text)
        if match[1] in languages
    ]


def read_commands():
    """Returns (document name, words) of every line in the shell blocks."""
    return [
        (path.name, shlex.split(line.removeprefix("$ "), comments=True))
        for path in DOCUMENTS
        for _, block in read_blocks(path, SHELLS)
        for line in block.replace("\\\n", " ").splitlines()
        if "make " in line or "python" in line
    ]


def read_scripts():
    """Returns (file name, text) of the blocks that are whole programs: those with a title."""
    title = re.compile(r'^```python title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
    return [found for path in DOCUMENTS for found in title.findall(path.read_text())]


def words_after(words, *prefix):
    """Returns what follows the first occurrence of `prefix` among the words."""
    for i in range(len(words)):
        if tuple(words[i : i + len(prefix)]) == prefix:
            return words[i + len(prefix) :]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("doppler_jax.methods.registry.OWN", {})
    monkeypatch.setenv("DOPPLER_JAX_CACHE", str(tmp_path / "cache"))
    module = types.ModuleType("documented_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
    for line, code in read_blocks(path, {"python"}):
        # The padding makes tracebacks point into the document.
        exec(compile("\n" * line + code, str(path), "exec"), module.__dict__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"), read_scripts(), ids=[name for name, _ in read_scripts()]
)
def test_scripts_run_in_processes_of_their_own(name, code, tmp_path):
    (tmp_path / name).write_text(code)
    assert printed(name, cwd=tmp_path, DOPPLER_JAX_CACHE="off")


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^::: doppler_jax\.(\w+)$", text, re.MULTILINE)) == dj.__all__


def test_every_method_has_a_row_in_the_guide():
    text = (ROOT / "docs" / "methods.md").read_text()
    assert sorted(re.findall(r"^\| `([\w+]+)` \|", text, re.MULTILINE)) == dj.list_methods()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_documented_targets_and_modules_exist():
    assert read_blocks(ROOT / "README.md", {"python"})
    assert any(words_after(words, "make") for _, words in read_commands())
    makefile = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^([a-z][\w -]*):", makefile, re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for document, words in read_commands():
        for word in words_after(words, "make"):
            if "=" not in word and not word.startswith("-"):
                assert word in targets, f"{document}: make {word}"
    for document, words in read_commands():
        for name in words_after(words, "-m")[:1]:
            spec = importlib.util.find_spec(name)
            assert spec, f"{document}: python -m {name}"
            if spec.submodule_search_locations:  # a package runs its __main__
                assert importlib.util.find_spec(f"{name}.__main__"), f"{document}: -m {name}"
