"""The runner of every study: cells -> kept records -> tables and pictures -> a results page.

A study is a `Study`: its settings, the cells that they ask for, and a page made of what the
cells gave. `method_cells` makes the cells of problems x methods x budgets x seeds.

Records are lines of runs/NAME/records.jsonl, written as each cell ends and never changed, so
that a run can be killed at any moment and goes on from there. A cell is found by its key: all
that determines it, settings included, but for the commit, which is written beside the result.
The page is runs/NAME/NAME.md; `--publish` also writes it to docs/results/.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import importlib
import inspect
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.reports.tables import format_seconds, format_table
from experiments import STUDIES
from experiments.catalogue import Problem, file_digest, load_problem

EQUAL = 1e-5
"""Relative difference up to which two makespans count as equal: simulators agree to that."""

WARM_UP_S = 0.5
"""Budget of a run that only compiles; one in evaluations could make batches smaller."""

WARM_UPS = 2
"""Such runs: in the first one DOPPLER may spend the budget before stage 1 is compiled."""

PAGES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "results"

Record = dict[str, Any]

Draw = Callable[[pathlib.Path], None]
"""Writes a picture to a path."""

Method = Callable[[dj.TaskGraph, dj.Costs, dj.Budget, jax.Array], Any]
"""A method of one's own: returns the device of each task, `[N]`, or a `dj.Placed`."""


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
class MethodSettings(Settings):
    """Options of a study of methods."""

    problems: tuple[str, ...] = ()
    """Names as in experiments/catalogue.py."""
    method: tuple[str, ...] = ()
    """Of `dj.list_methods()`; or a function of yours, `mypkg.mymodule:fn`, that takes graph,
    costs, a `dj.Budget` and a key, and returns device per task (or a `dj.Placed`)."""
    links: tuple[str, ...] = ("parallel",)
    evaluations: tuple[int, ...] = ()
    """Budgets in simulated executions."""
    seconds: tuple[float, ...] = ()
    """Budgets in seconds of a cold call: what it compiles counts."""
    warm_seconds: tuple[float, ...] = ()
    """Budgets in seconds that begin when everything has been compiled."""
    seeds: int = 5

    def spends(self) -> "list[Spend]":
        """Returns the budgets asked for, one without bounds where none is."""
        return [
            *(Spend(evaluations=n) for n in sorted(self.evaluations)),
            *(Spend(seconds=s) for s in sorted(self.seconds)),
            *(Spend(seconds=s, warm=True) for s in sorted(self.warm_seconds)),
        ] or [Spend()]


@dataclasses.dataclass(frozen=True)
class Spend:
    """What a run may spend; in keys of records, so without a clock (as `dj.Budget` has)."""

    evaluations: int | None = None  # simulated executions
    seconds: float | None = None
    warm: bool = False  # seconds begin when everything has been compiled

    FIELDS: ClassVar = ("evaluations", "seconds", "warm")

    def __str__(self) -> str:
        if self.evaluations is not None:
            return f"{self.evaluations:,} evaluations"
        if self.seconds is None:
            return ""
        return f"{self.seconds:g} s{', warm' if self.warm else ''}"

    @property
    def key(self) -> Record:
        """What of it is set."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v}


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
    """What a study says, in Markdown but for the heading, and its pictures by file name."""

    text: str
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
        missing = f"\nNot run: {wanted - len(found)} of {wanted} cells.\n"
        text = (
            f"# {self.title}\n\n{provenance_line(self.name, found)}\n\n{page.text.strip()}\n"
            + (missing if len(found) < wanted else "")
            + "".join(f"\n![{name}]({name})\n" for name in page.pictures)
        )
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
        self.path = path
        self._found: dict[str, Record] = {}

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"{self.path}: another run writes to it") from error
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                record = json.loads(line)
                self._found[_text(record["cell"])] = record
            except (ValueError, TypeError, KeyError) as error:
                self._file.close()
                raise ValueError(f"{self.path}: line {number} is no record") from error
        return self

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


def method_cells(
    context: Context[Any],
    problems: Sequence[str],
    methods: Sequence[str],
    spends: Sequence[Spend],
    seeds: int = 1,
    links: Sequence[str] = ("parallel",),
    policy: Callable[[str], dj.Policy | None] = lambda method: None,
    **key: Any,
) -> list[Cell]:
    """Returns the cells of methods on problems.

    Args:
      context: of the study.
      problems: names.
      methods: names, or `module:function`.
      spends: budgets.
      seeds: keys are `jax.random.key(0)` to `key(seeds - 1)`.
      links: kinds of links.
      policy: of a method by its name; what it holds belongs into `key`.
      **key: joins the key of every record.

    Raises:
      ValueError: a method is unknown, or a function cannot be imported.
    """
    sources = {method: _own_source(method) for method in methods}
    return [
        Cell(
            {"problem": problem, "links": link, "method": method, **spend.key, "seed": seed}
            | ({"source": sources[method]} if sources[method] else {})
            | ({"file": digest} if (digest := file_digest(problem)) else {})
            | key,
            partial(_named_cell, context, problem, method, spend, seed, link, policy),
        )
        for problem in problems
        for link in links
        for spend in spends
        for seed in range(seeds)  # outside of methods: a machine's drift hits all alike
        for method in methods
    ]


def _named_cell(
    context: Context[Any],
    problem: str,
    method: str,
    spend: Spend,
    seed: int,
    links: str,
    policy: Callable[[str], dj.Policy | None],
) -> Record:
    return place_cell(context.problem(problem), method, spend, seed, links, policy(method))


def place_cell(
    problem: Problem,
    method: str,
    spend: Spend,
    seed: int,
    links: str = "parallel",
    policy: dj.Policy | None = None,
    own: Method | None = None,
) -> Record:
    """Returns what a method finds for a problem, by the float64 oracle.

    Seconds are cold unless the budget is a warm one: nothing is compiled when they begin.
    `own` is run in place of the method of that name.

    Raises:
      KeyboardInterrupt: the search was stopped; what it found is not what its budget gives.
    """
    run = partial(_place, method, policy)
    if own is not None or ":" in method:
        run = partial(_place_by_own, own or own_method(method))
    args = jax.random.key(seed), dj.Objective(links)
    try:
        if not spend.warm:
            with cold() if spend.seconds else contextlib.nullcontext():
                return run(problem, spend, *args)
        began = time.monotonic()
        for _ in range(WARM_UPS):
            run(problem, Spend(seconds=WARM_UP_S), jax.random.key(seed), args[1])
        return {"first_s": time.monotonic() - began} | run(problem, spend, *args)
    except ValueError as error:
        return {"refused": str(error)}


def _place(
    method: str, policy: dj.Policy | None, problem: Problem, spend: Spend, *args: Any
) -> Record:
    key, objective = args
    options = {"policy": policy, "key": key, "objective": objective, "budget_s": spend.seconds}
    placed = dj.place(
        problem.graph,
        problem.costs,
        method=method,
        max_evaluations=spend.evaluations,
        **options,
    )
    if placed.interrupted:
        raise KeyboardInterrupt
    curve = placed.curve
    return {
        "makespan_s": placed.makespan_s,
        "lower_bound_s": placed.lower_bound_s,
        "tasks": problem.graph.num_tasks,
        "evaluations_spent": placed.evaluations,
        "seconds_spent": placed.seconds,
        "curve": np.stack([curve.evaluations, curve.seconds, curve.makespan_s]).tolist(),
        "placement": placed.placement.tolist(),
        "priority": placed.priority.tolist(),
    }


def _place_by_own(method: Method, problem: Problem, spend: Spend, *args: Any) -> Record:
    (key, objective), (graph, costs) = args, (problem.graph, problem.costs)
    budget = dj.Budget(evaluations=spend.evaluations, seconds=spend.seconds)
    found = method(graph, costs, budget, key)
    seconds = budget.seconds_spent()
    placement = np.asarray(getattr(found, "placement", found))
    schedule = dj.simulate_oracle(graph, costs, placement, links=objective.links)
    return {
        "makespan_s": dj.makespan_s(schedule),
        "lower_bound_s": dj.lower_bound_s(graph, costs),
        "tasks": graph.num_tasks,
        "seconds_spent": seconds,
        "placement": placement.tolist(),
    }


def own_method(name: str) -> Method:
    """Returns a user's function by `module:function`.

    Raises:
      ValueError: it cannot be imported.
    """
    module, _, function = name.partition(":")
    sys.path[:0] = [] if "" in sys.path else [""]  # the folder that the command runs in
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"method {name!r} cannot be imported: {error}") from error


def _own_source(method: str) -> str | None:
    """Returns a digest of the module of a user's method: another version is another cell."""
    if ":" not in method:
        check_names("--method", [method], dj.list_methods())
        return None
    module = inspect.getmodule(own_method(method))
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:16] if module else ""


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Within it nothing is compiled beforehand, in this process or in a cache on disk."""
    on_disk = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.clear_caches()
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", on_disk)
        compilation_cache.reset_cache()


def table(rows: Sequence[Record]) -> str:
    """Returns a table of rows by their headings; a heading's end `_s` makes seconds of numbers.

    Other floats have three digits, None is `-`.
    """

    def text(heading: str, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or "-"
        if isinstance(value, int):
            return f"{value:,}"
        return format_seconds(value, 3) if heading.endswith("_s") else f"{value:.3f}"

    headings = [heading.removesuffix("_s") for heading in rows[0]]
    return format_table(headings, [[text(*cell) for cell in row.items()] for row in rows])


def means_table(
    records: Sequence[Record],
    rows: Sequence[str],
    column: str = "method",
    value: str = "makespan_s",
    scale: float = 1.0,
    extra: Mapping[str, Callable[[list[Record]], str]] | None = None,
) -> str:
    """Returns a table of mean ± standard deviation over seeds, `*` behind a row's least.

    Args:
      records: of the cells.
      rows: fields that tell rows apart.
      column: field of which each value is a column.
      value: field that is shown; records without it, which refused, count as absent.
      scale: of the value as shown.
      extra: further columns, of the records of a row.
    """
    columns = list(dict.fromkeys(record[column] for record in records))
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(_word(record, field) for field in rows), []).append(record)
    lines = []
    for words, group in groups.items():
        found = [
            np.array([scale * r[value] for r in group if r[column] == c and value in r])
            for c in columns
        ]
        means = [float(values.mean()) if values.size else np.nan for values in found]
        texts = [format_spread(values) for values in found]
        more = [make(group) for make in (extra or {}).values()]
        lines.append((*words, *star_least(texts, means), *more))
    return format_table((*rows, *columns, *(extra or {})), lines)


def _word(record: Record, field: str) -> str:
    if field == "budget":
        return str(Spend(**{k: record[k] for k in Spend.FIELDS if k in record}))
    return str(record.get(field, ""))


def format_spread(values: np.ndarray) -> str:
    """Returns mean and standard deviation, `12.35 ± 0.04`; runs that agree show none."""
    if not len(values):
        return "-"
    mean, deviation = float(values.mean()), float(values.std())
    decimals = max(0, 3 - int(np.floor(np.log10(max(abs(mean), 1e-6)))))
    spread = f" ± {deviation:.{decimals}f}" if deviation > 1e-6 * abs(mean) else ""
    return f"{mean:.{decimals}f}{spread}"


def star_least(texts: Sequence[str], values: Sequence[float]) -> list[str]:
    """Returns the texts with `*` behind those whose value is the least, nan being none."""
    if np.isnan(values).all():
        return list(texts)
    least = np.nanmin(values)
    return [
        text + "*" * bool(value <= least * (1 + EQUAL))
        for text, value in zip(texts, values, strict=True)
    ]


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
    devices = jax.devices()
    kind = (
        "" if devices[0].platform == "cpu" else f", {len(devices)} x {devices[0].device_kind}"
    )
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
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        here = pathlib.Path(__file__).parent
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _text(key: Record) -> str:
    return json.dumps(key, sort_keys=True)
