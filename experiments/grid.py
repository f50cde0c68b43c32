"""The runner of every study: cells -> kept records -> tables and pictures -> a results page.

A study is a `Study`: its settings, the cells that they ask for, and a page made of what the
cells gave, below what the module's docstring says. `methods.py` makes cells of methods,
`machine.py` of what is measured, and `tables.py` shows records.

Records are lines of runs/NAME/records.jsonl, written as each cell ends and never changed, so
that a run can be killed at any moment and goes on from there. A cell is found by its key: all
that determines it, settings included, but for the commit, which is written beside the result.
The page is runs/NAME/NAME.md; `--publish` also writes it to docs/results/.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Generic, TypeVar

import jax

from doppler_jax import cli
from doppler_jax.reports.tables import format_seconds
from experiments import STUDIES
from experiments.catalogue import Problem, load_problem

PAGES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "results"

Record = dict[str, Any]

Draw = Callable[[pathlib.Path], None]
"""Writes a picture to a path."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of every study."""

    quick: bool = False
    """Small sizes, to see in minutes that all of it works; nothing to quote."""
    again: bool = False
    """Runs afresh what is kept; the newest record counts."""
    only_tables: bool = False
    """Runs nothing: tables of what is kept."""
    publish: bool = False
    """Also writes the page to docs/results/."""
    host_devices: int = os.cpu_count() or 1
    """Devices that the CPU is split into, where there is no accelerator."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Folder of all records."""
    shared: pathlib.Path = pathlib.Path("../shared")
    """Folder of published graphs."""


BASE = frozenset(field.name for field in dataclasses.fields(Settings))
"""Options that determine no record."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is computed once and kept."""

    key: Record  # of JSON values; all that determines the result
    make: Callable[[], Record]

    def __str__(self) -> str:
        return " ".join(str(v) for v in self.key.values() if isinstance(v, str | int | float))

    def then(self, change: Callable[[Record], Record], **key: Any) -> "Cell":
        """Returns the cell of what `change` makes of the result, unless it refused."""

        def make() -> Record:
            result = self.make()
            return result if "refused" in result else change(result)

        return Cell(self.key | key, make)


@dataclasses.dataclass(frozen=True)
class Page:
    """What a study says below its module's docstring, and its pictures by file name."""

    texts: Mapping[str, str]  # by heading; what is empty is left out
    pictures: Mapping[str, Draw] = dataclasses.field(default_factory=dict)


S = TypeVar("S", bound=Settings)


@dataclasses.dataclass(frozen=True)
class Context(Generic[S]):
    """What a study's functions get."""

    settings: S
    folder: pathlib.Path  # of the study's records, and of files of its own
    stack: contextlib.ExitStack  # closed when the cells are done

    def problem(self, name: str) -> Problem:
        """Returns the problem of a name."""
        return load_problem(name, self.settings.shared)

    def key(self, *but: str) -> Record:
        """Returns a study's own settings for keys of records, `but` some that do not matter."""
        own = {f.name for f in dataclasses.fields(self.settings)} - {*but, *BASE}
        return {k: v for k, v in dataclasses.asdict(self.settings).items() if k in own}


@dataclasses.dataclass(frozen=True)
class Study(Generic[S]):
    """A declaration: what to compute, and what to say of it."""

    name: str
    settings: S  # as they are without options
    cells: Callable[[Context[S]], Sequence[Cell]]
    report: Callable[[Context[S], list[Record]], Page]
    quick: Mapping[str, Any]  # settings of --quick

    @property
    def title(self) -> str:
        """What it asks."""
        return f"{self.name}: {STUDIES[self.name]}"

    def command(self) -> None:
        """Runs it as a command line, whose defaults are `settings`."""
        cli.run(self.run, type(self.settings), self.title, default=self.settings)

    def run(self, settings: S) -> None:
        """Computes what is missing, prints and writes the page; Ctrl-C leaves what is kept.

        Raises:
          ValueError: a setting is invalid, or another run writes to the same records.
          KeyboardInterrupt: after the page has been written.
        """
        check(settings)
        if settings.quick:
            settings = dataclasses.replace(settings, **self.quick)
        if settings.host_devices != jax.config.jax_num_cpu_devices:  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", settings.host_devices)
        folder = settings.runs / self.name
        with contextlib.ExitStack() as stack:
            book = stack.enter_context(Records(folder / "records.jsonl"))
            context = Context(settings, folder, stack)
            cells = self.cells(context)
            try:
                if not settings.only_tables:
                    compute(self.name, book, cells, again=settings.again)
            finally:
                found = [r for cell in cells if (r := book.find(cell.key)) is not None]
                text = self._write(context, found, len(cells)) if found else ""
        print(text)

    def _write(self, context: Context[S], found: list[Record], wanted: int) -> str:
        settings, folder = context.settings, context.folder
        page = self.report(context, found)
        for name, draw in page.pictures.items():
            draw(folder / name)
        about = (sys.modules[self.cells.__module__].__doc__ or "").partition("\n\n")[2]
        texts = [f"# {self.title}", provenance_line(self.name, found), about.strip()]
        for heading, text in page.texts.items():
            texts.append(
                f"## {heading}\n\n{text}".strip() if heading and text else text.strip()
            )
        if len(found) < wanted:
            texts.append(f"Not run: {wanted - len(found)} of {wanted} cells.")
        texts += [f"![{name}]({name})" for name in page.pictures]
        text = "\n\n".join(filter(None, texts)) + "\n"
        (folder / f"{self.name}.md").write_text(text, encoding="utf-8")
        if settings.publish:
            PAGES.mkdir(parents=True, exist_ok=True)
            for name in (f"{self.name}.md", *page.pictures):
                shutil.copyfile(folder / name, PAGES / name)
        return text


class Records(contextlib.AbstractContextManager["Records"]):
    """The records of a JSONL file, one line each; the last of a key counts.

    A last line without its end was cut off by a kill: it is dropped.

    Raises:
      ValueError: another process writes to the file, or a line is no record.
    """

    def __init__(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._found = path.open("a+b"), dict[str, Record]()
        try:
            self._read(path)
        except ValueError:
            self._file.close()
            raise

    def _read(self, path: pathlib.Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path}: another run writes to it") from error
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        self._file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                record = json.loads(line)
                self._found[_text(record["cell"])] = record
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}: line {number} is no record") from error

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def find(self, key: Record) -> Record | None:
        """Returns the result of a key with the key's own entries, None if there is none."""
        record = self._found.get(_text(key))
        return None if record is None else {**key, **record["result"], "made": record["made"]}

    def keep(self, key: Record, result: Record) -> None:
        """Appends a result; when this returns it outlives a kill."""
        record = {"cell": key, "made": provenance(), "result": result}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._found[_text(key)] = json.loads(json.dumps(record))


def cells_of(
    run: Callable[..., Record], axes: Mapping[str, Sequence[Any]], **more: Any
) -> list[Cell]:
    """Returns a cell per combination of what the axes hold, the last axis first.

    `run` takes the combination by name; `more` joins the keys of the records.
    """
    each = itertools.product(*axes.values())
    keys: list[Record] = [dict(zip(axes, one, strict=True)) for one in each]
    return [Cell(key | more, partial(run, **key)) for key in keys]


def compute(name: str, book: Records, cells: Sequence[Cell], *, again: bool = False) -> None:
    """Makes the cells that are not kept, in their order; what refused is asked again.

    Raises:
      ValueError: two cells have one key.
    """
    keys = [_text(cell.key) for cell in cells]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{name}: two cells have the key {max(keys, key=keys.count)}")
    for number, cell in enumerate(cells, start=1):
        kept = book.find(cell.key)
        if kept is not None and "refused" not in kept and not again:
            continue
        began = time.monotonic()
        result = cell.make()
        book.keep(cell.key, result)
        value = format_seconds(result["makespan_s"]) if "makespan_s" in result else "done"
        spent = time.monotonic() - began
        print(f"[{number}/{len(cells)}] {cell}: {value} ({spent:.1f} s)", file=sys.stderr)


def check(settings: Any) -> None:
    """Raises `ValueError` where a count of a settings dataclass is below 1."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                least = 0 if field.name == "shots" else 1e-9
                if not least <= number < 2**40:
                    option = f"--{field.name.replace('_', '-')}"
                    raise ValueError(f"{option} is {number}; expected more than 0")


def check_names(option: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    """Raises `ValueError` where an option names nothing, or what is not known."""
    if not chosen:
        raise ValueError(f"{option}: expected at least one of {', '.join(known)}")
    for name in chosen:
        if name not in known:
            raise ValueError(f"{option}: unknown {name!r}; known: {', '.join(known)}")


def provenance() -> Record:
    """Returns commit, date and machine: where a record comes from."""
    device = jax.devices()[0]
    kind = "" if device.platform == "cpu" else f", {len(jax.devices())} x {device.device_kind}"
    machine = f"{platform.machine()}, {os.cpu_count()} cores{kind}, jax {jax.__version__}"
    today = datetime.date.today().isoformat()
    return {"commit": _commit(), "date": today, "machine": machine}


def provenance_line(name: str, records: Sequence[Record]) -> str:
    """Returns the one line of a page: its command, and commits, machines and dates."""
    command = shlex.join(["python", "-m", f"experiments.{name}", *sys.argv[1:]])
    made = [record["made"] for record in records]
    parts = [" and ".join(sorted({one[k] for one in made})) for k in made[0]]
    return f"`{command}`; commit {parts[0]}; {parts[1]}; {parts[2]}."


@cache  # of the code that runs, whatever is checked out meanwhile
def _commit() -> str:
    """Returns the commit of this checkout, "unknown" without git or outside one."""
    command, here = ["git", "describe", "--always", "--dirty", "--exclude", "*"], PAGES.parent
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return "unknown"


def _text(key: Record) -> str:
    return json.dumps(key, sort_keys=True)
