"""Everything once on a GPU, in under eight minutes: `make gpu`, or `python -m experiments.gpu`.

Versions, the engine on a GPU and a CPU as two unequal devices, what moving data costs, the
throughput of simulator and training, and the tests whose outcome a GPU may change. Every
part is a process of its own with a bound of its own, and the page is written after each: a
part that fails or runs out of time is a row that says so. `--platform cpu` runs all of it on
CPU devices at tiny sizes, so that it works on the day there is a GPU.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jaxlib
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.policies import model
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.programs.workloads import Workload
from doppler_jax.reports.tables import format_table
from doppler_jax.simulator.simulate import simulate_padded
from doppler_jax.training.sim_rl import SimConfig, init_sim_state, sim_update
from experiments import grid
from experiments.engine import tiny_program
from experiments.machine import ROOT, relative_error, run_apart, seconds_of

WHOLE_S = 460.0
"""Seconds for all parts together; a part gets what is left of it, at most its own bound."""

WRONG = ("FAILED", "DIFFERENT")
"""What rows say that should not be."""

Rows = list[list[str]]


@dataclasses.dataclass(frozen=True)
class GpuSettings:
    """What to run, and where."""

    platform: Literal["gpu", "cpu"] = "gpu"
    """`cpu`: CPU devices in the GPU's place, at tiny sizes."""
    output: pathlib.Path = pathlib.Path("docs/results/gpu.md")
    """The page, written after every part."""
    graph: str = str(
        ROOT.parent / "shared/reference_graphs/full_transformer_layer_261nodes.txt"
    )
    """Task graph to simulate and train on; a generated one stands in where it is absent."""
    parts: tuple[str, ...] = ()
    """Names of parts, by default all."""
    commit: str = ""
    """What the page calls the code, by default what git says."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What the process of a part is told."""

    part: str
    rows: str
    """File to which the table's rows are appended, each a line of JSON."""
    graph: str
    commit: str
    tiny: bool
    """Whether it is on CPU devices and sizes only show that it works."""
    on_host: bool
    """Whether it is the run on the host's cores alone, for rows beside the GPU's."""
    bound_s: float
    """After which the process is killed."""

    def emit(self, *cells: Any) -> None:
        """Adds a row of the table; the first cell is a label, missing ones stay empty."""
        with open(self.rows, "a", encoding="utf-8") as file:
            file.write(json.dumps(PARTS[self.part].row(*cells)) + "\n")

    def run(self) -> None:
        """Runs the part in this process, which was started for it.

        Raises:
          ValueError: there is no GPU where one is asked for.
        """
        jax.config.update("jax_num_cpu_devices", (os.cpu_count() or 1) if self.on_host else 2)
        # Products in ten bits (TF32), as by default, would say nothing of equality.
        jax.config.update("jax_default_matmul_precision", "highest")
        if not self.tiny and not self.on_host and jax.default_backend() != "gpu":
            raise ValueError(f"no GPU, JAX has {jax.devices()}; --platform cpu does without")
        PARTS[self.part].run(self)


@dataclasses.dataclass(frozen=True)
class Part:
    """A table of the page."""

    title: str
    columns: tuple[str, ...]
    run: Callable[[Job], None]
    bound_s: float
    also_host: bool = False
    """Whether it runs once more on the host's cores, with a bound as long."""
    note: str = ""
    """What to know when reading the table."""

    def row(self, *cells: Any) -> list[str]:
        """Returns the cells of a row, filled up with empty ones."""
        return [*map(str, cells), *[""] * (len(self.columns) - len(cells))]


def main(settings: GpuSettings) -> None:
    """Runs the parts and writes the page; leaves with 1 if one failed or ran out of time.

    Raises:
      ValueError: there is no part of a name.
    """
    names = settings.parts or tuple(PARTS)
    grid.check_names("--parts", names, list(PARTS))
    rows: dict[str, Rows] = {}
    graph, tiny = os.path.abspath(settings.graph), settings.platform == "cpu"
    slack = 4 if tiny else 1  # where other tests have the cores
    failed, stop_at = set(), time.monotonic() + WHOLE_S * slack
    for name in names:
        part, rows[name], began = PARTS[name], [], time.monotonic()
        for on_host in (False, True)[: 1 + part.also_host]:
            bound_s = min(part.bound_s * slack, max(stop_at - time.monotonic(), 1.0))
            with tempfile.TemporaryDirectory() as folder:
                kept = pathlib.Path(folder, "rows")
                kept.touch()
                job = Job(name, str(kept), graph, settings.commit, tiny, on_host, bound_s)
                trouble = _run_apart(job, pathlib.Path(folder, "log"))
                found = kept.read_text(encoding="utf-8")
            rows[name] += map(json.loads, found.splitlines())
            if trouble:
                label = f"{name}{' on the host' if on_host else ''}: not finished"
                rows[name].append(part.row(label, trouble))
            if trouble or any(word in found for word in WRONG):
                failed.add(name)
            _write_page(settings.output, rows)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    print(settings.output.read_text(encoding="utf-8"))
    if failed:
        sys.exit(f"failed or ran out of time: {', '.join(n for n in names if n in failed)}")


def _run_apart(job: Job, log: pathlib.Path) -> str:
    """Runs a job in a process of its own, with a log; returns what went wrong, or nothing."""
    # A test may be what runs this, and the part may run tests.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["JAX_PLATFORMS"] = "cpu" if job.on_host or job.tiny else "cuda,cpu"
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share the GPU in tests
    call = f"from experiments.gpu import Job; Job(**{dataclasses.asdict(job)}).run()"
    code, _ = run_apart([sys.executable, "-c", call], job.bound_s, log, env)
    if not code:
        return "" if code == 0 else f"out of time after {job.bound_s:.0f} s"
    said = log.read_text(encoding="utf-8", errors="replace").strip()
    print(said[-6000:], flush=True)
    return ": ".join([f"exit status {code}", *said.splitlines()[-1:]])[:300]


def _write_page(path: pathlib.Path, rows: dict[str, Rows]) -> None:
    known = {what: which for what, which, *_ in rows.get("versions", [])}
    stated = [known[what] for what in ("commit", "device", "host", "date") if what in known]
    made = ", ".join(["`python -m experiments.gpu`", *stated])
    texts = [f"# On a GPU\n\nMade by {made}.\n"]
    for name, found in rows.items():
        part = PARTS[name]
        note = f"\n{part.note}\n" if part.note else ""
        texts.append(f"## {part.title}\n\n{format_table(part.columns, found)}{note}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts), encoding="utf-8")


# The parts.


def versions(job: Job) -> None:
    """Says with what all the rest was measured."""
    made = grid.provenance()
    job.emit("commit", job.commit or made["commit"])
    job.emit("date", made["date"])
    job.emit("device", f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    job.emit("host", f"{os.cpu_count()} cores")
    job.emit("GPU and its driver", _graphics_card())
    job.emit("what JAX runs on", " ".join(jax.devices()[0].client.platform_version.split()))
    for module in (jax, jaxlib, np):
        job.emit(module.__name__, module.__version__)
    job.emit("python", sys.version.split()[0])


def _graphics_card() -> str:
    """Returns what the driver says of the GPU."""
    query = "--query-gpu=name,driver_version,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return " ".join(done.stdout.split())
    return "none"


def engine(job: Job) -> None:
    """Runs two programs on two unequal devices: in every mode, and placed by us."""
    devices = _two_devices()
    local = dj.LocalDevices(devices)
    rounds = 2 if job.tiny else 5
    for workload in _programs(job.tiny):
        name, fn = workload.name, workload.fn
        args = jax.device_put(dj.make_arrays(workload, jax.random.key(1)), devices[0])
        plain = jax.jit(fn)
        expected = jax.device_get(plain(*args))
        jit_ms = 1e3 * _median_s(partial(plain, *args), rounds)
        job.emit(name, f"`jax.jit` on {devices[0]}", *[""] * 4, f"{jit_ms:.2f}")
        sharded = dj.partition(dj.trace(fn, *args), 2)
        tasks = sharded.graph.num_tasks
        for where, placement in (
            (f"all on {devices[0]}", np.zeros(tasks, np.int32)),
            ("random on both", np.random.default_rng(0).integers(2, size=tasks)),
        ):
            for mode in local.modes:
                with _going_on(job, name, where, mode):
                    step = dj.compile(sharded, placement, devices=local, mode=mode)
                    job.emit(name, where, mode, *_judge(step, args, expected, rounds))
        with _going_on(job, name, "`place_and_compile`", ""):
            found = dj.place_and_compile(
                fn, *args, devices=devices, budget_s=5.0, method="annealing"
            )
            job.emit(name, "`place_and_compile`", "", *_judge(found, args, expected, rounds))


def _judge(step: Any, args: tuple[Any, ...], expected: Any, rounds: int) -> tuple[str, ...]:
    """Returns cells: outputs as expected, legal traces, makespan and seconds of whole calls.

    Raises:
      ValueError: a trace is not legal.
    """
    error = relative_error(step(*args), expected)
    makespans_s, calls_s = [], []
    for _ in range(rounds):
        calls_s.append(seconds_of(lambda: step(*args)))
        dj.validate(step.graph, step.trace)
        makespans_s.append(step.trace.finish_s.max())
    return (
        f"{'equal' if error < 1e-4 else 'DIFFERENT'} ({error:.0e})",
        f"valid, {step.graph.num_tasks} tasks",
        f"{1e3 * np.median(makespans_s):.2f}",
        f"{1e3 * np.median(calls_s):.2f}",
    )


def _programs(tiny: bool) -> tuple[Workload, ...]:
    """Returns two workloads, on a GPU of sizes that give it something to do."""
    if tiny:
        return dj.make_workload("ffnn", "small"), dj.make_workload("chainmm", "small")
    wide = {"batch": 2048, "features": 2048, "hidden": 8192}
    deep = {"sequence": 512, "width": 1024, "hidden": 4096, "heads": 16}
    return (
        dj.make_workload("ffnn", "small", **wide),
        dj.make_workload("llama_block", "small", **deep),
    )


def moving(job: Job) -> None:
    """Times dispatch, transfers, and copies that are enqueued behind other work."""
    devices = _two_devices()
    with _going_on(job, "dispatch"):
        _time_dispatch(job, devices, 20 if job.tiny else 200)
    pairs = (devices, devices[::-1])
    for num_bytes in (1 << 10, 1 << 20, 1 << (21 if job.tiny else 26)):
        for source, target in pairs:
            copy = _copy_call(num_bytes, source, target)
            seconds = _median_s(copy, 3 if job.tiny else 20)
            rate = f"{num_bytes / seconds / 1e9:.2f} GB/s"
            job.emit(f"copy of {num_bytes:,} bytes, {source} to {target}", _us(seconds), rate)
    for source, target in pairs:
        for copy_first in (False, True):
            _time_copy_and_work(job, devices[0], source, target, copy_first)


def _time_dispatch(job: Job, devices: Sequence[jax.Device], depth: int) -> None:
    """Adds rows: seconds per tiny task in a chain, of bare calls and of every mode."""
    sharded, args = tiny_program(depth, 64, is_chain=True)
    x, one = jax.device_put(args, devices[0])
    bare = jax.jit(sharded.kernels[0].fn).lower(x, one).compile()

    def bare_calls() -> list[jax.Array]:
        made = [x]
        for _ in range(depth):
            made = bare(made[0], one)
        return made

    job.emit("tiny task, bare calls", _us(_median_s(bare_calls, 5) / depth), f"{depth} tasks")
    local = dj.LocalDevices(devices)
    for where, placement in (
        (f"on {devices[0]}", np.zeros(depth, np.int32)),
        ("by turns on both", np.arange(depth) % 2),
    ):
        for mode in local.modes:
            step = dj.compile(sharded, placement, devices=local, mode=mode)
            seconds = _median_s(partial(step, x, one), 5) / depth
            job.emit(f"tiny task, {mode}, {where}", _us(seconds), f"{depth} tasks")


def _time_copy_and_work(
    job: Job, worker: jax.Device, source: jax.Device, target: jax.Device, copy_first: bool
) -> None:
    """Adds a row: when a copy is there whose operand was ready and whose device is at work.

    A chain of products is enqueued on the worker and the copy behind it, or the other way
    round. An engine that enqueues far ahead depends on whether the copy waits.
    """
    size, depth = (256, 16) if job.tiny else (8192, 8)

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        for _ in range(depth):
            x = (x @ x) / size
        return x

    x = jax.device_put(np.ones((size, size), np.float32), worker)
    copy = _copy_call((1 << 18) if job.tiny else (1 << 24), source, target)
    alone_s, work_s = _median_s(copy, 5), _median_s(lambda: products(x), 3)
    began = time.perf_counter()
    if copy_first:
        copied, made = copy(), products(x)
    else:
        made, copied = products(x), copy()
    enqueued_s = time.perf_counter() - began
    jax.block_until_ready(copied)
    copied_s = time.perf_counter() - began
    jax.block_until_ready(made)
    waits = "WAITS for it" if copied_s > alone_s + work_s / 2 else "does not wait"
    order = "enqueued before" if copy_first else "enqueued behind"
    job.emit(
        f"copy {source} to {target}, {order} {1e3 * work_s:.1f} ms of work on {worker}",
        _us(copied_s),
        f"{waits}; alone {_us(alone_s)}; host free after {_us(enqueued_s)}",
    )


def _copy_call(num_bytes: int, source: jax.Device, target: jax.Device) -> Callable[[], Any]:
    array = jax.device_put(np.ones(num_bytes // 4, np.float32), source)
    jax.block_until_ready(array)
    return lambda: jax.device_put(array, target)


def simulator(job: Job) -> None:
    """Times the lock-step simulator in float32; on the host's cores `dj.simulate`, float64."""
    name, graph, costs = _problem(job)
    way = "`dj.simulate`, float64" if job.on_host else "lock-step, float32"
    padded = jax.device_put(pad_problem(graph, costs))
    spare = padded.padded_tasks - graph.num_tasks
    rng = np.random.default_rng(0)
    for links in ("parallel", "serial"):
        for batch in (256,) if job.tiny else (65536, 16384, 2048, 256):
            placements = rng.integers(costs.num_devices, size=(batch, graph.num_tasks))
            rows = jax.device_put(np.pad(placements, ((0, 0), (0, spare))).astype(np.int32))
            call: Callable[[], Any] = partial(simulate_padded, padded, rows, links=links)
            if job.on_host:
                objective = dj.Objective(links=links)
                call = partial(dj.simulate, graph, costs, placements, objective=objective)
            first_s = seconds_of(call)
            rate = f"{batch / _median_s(call, 2 if job.tiny else 5):,.0f}"
            job.emit(f"{name}; {way}, {_where()}", links, f"{batch:,}", rate, f"{first_s:.1f}")


def training(job: Job) -> None:
    """Times an update of stage 2: rollouts, simulation, local search and descent in one jit."""
    name, graph, costs = _problem(job)
    for batch in (16,) if job.tiny else (256,) if job.on_host else (256, 2048):
        config = SimConfig(batch=batch, num_chains=batch // 2)
        if job.tiny:
            config = SimConfig(batch=16, minibatches=1, num_chains=8, search_rounds=1)
        problem, policy = make_policy_inputs(graph, costs), PolicyConfig()
        init = jax.jit(partial(model.init_params, config=policy))
        params = init(jax.random.key(0), problem=problem)
        state = init_sim_state(jax.random.key(1), params, problem, config)
        calls_s = []
        for _ in range(3 if job.tiny else 6):
            began = time.perf_counter()
            state, _ = jax.block_until_ready(sim_update(state, problem, policy, config))
            calls_s.append(time.perf_counter() - began)
        rate = f"{batch / np.median(calls_s[1:]):,.0f}"
        where = f"{name}, {_where()}, {config.shards} used"
        job.emit(where, f"{batch:,}", rate, f"{calls_s[0]:.1f}")


def tests(job: Job) -> None:
    """Runs fast tests with the GPU as JAX's default: a row for all, and one per failure."""
    whole, few = ["tests/policies", "tests/simulator"], ["tests/policies/test_features.py"]
    what = few if job.tiny else whole
    # A warning, of another JAX say, is not what a GPU changes.
    command = [sys.executable, "-m", "pytest", *what, "-rfE", "-W", "default", "--durations=1"]
    command += ["-n", "0"] if job.tiny else ["-n", "12", "--dist", "loadfile"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        child = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            child.wait(max(job.bound_s - 30, 1.0))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)  # so that it says how far it came
            child.wait(15)
        out.seek(0)
        lines = [line.strip("= \n") for line in out if line.strip("= \n")]
    print("\n".join(lines), flush=True)
    job.emit(" ".join(what), lines[-1])
    for line in [line for line in lines if line.startswith(("FAILED ", "ERROR "))][:40]:
        job.emit(*line[:300].partition(" - ")[::2])
    if child.returncode:
        sys.exit("tests failed or were not finished")


@contextlib.contextmanager
def _going_on(job: Job, *labels: str) -> Iterator[None]:
    """Makes of a failure a row, so that what comes after is still run."""
    try:
        yield
    except Exception as error:  # whatever it is, the page says it
        said = " ".join(str(error).split())[:300]
        job.emit(*labels, f"FAILED, {type(error).__name__}: {said}")


def _two_devices() -> tuple[jax.Device, jax.Device]:
    """Returns the GPU and a CPU device, or two CPU devices."""
    return jax.devices()[0], jax.devices("cpu")[-1]


def _where() -> str:
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def _problem(job: Job) -> tuple[str, dj.TaskGraph, dj.Costs]:
    """Returns name, graph and costs on four devices."""
    cluster = dj.make_cluster("p100x4")
    if os.path.exists(job.graph) and not job.tiny:
        name, graph = pathlib.Path(job.graph).stem, dj.load_graph(job.graph)
    else:
        name = "chainmm" if job.tiny else "llama_layer"
        workload = dj.make_workload(name, "small")
        graph = dj.partition(dj.trace(workload.fn, *workload.args), 4).graph
    return f"{name}, {graph.num_tasks} tasks", graph, dj.make_costs(graph, cluster)


def _median_s(call: Callable[[], Any], rounds: int) -> float:
    """Returns the median seconds of so many calls after one that does not count."""
    return float(np.median([seconds_of(call) for _ in range(rounds + 1)][1:]))


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"


PARTS = {
    "versions": Part("Versions", ("what", "which"), versions, bound_s=40),
    "engine": Part(
        "The engine on two unequal devices",
        ("program", "placement", "mode", "outputs", "traces", "makespan (ms)", "call (ms)"),
        engine,
        bound_s=180,
        note="Products in full float32. A call also lays arguments and assembles outputs.",
    ),
    "moving": Part("Dispatch and transfers", ("what", "µs", "notes"), moving, bound_s=50),
    "simulator": Part(
        "Simulations",
        ("problem and way", "links", "batch", "placements per second", "first call (s)"),
        simulator,
        bound_s=70,
        also_host=True,
    ),
    "training": Part(
        "Stage 2",
        ("problem and devices", "batch", "episodes per second", "first update (s)"),
        training,
        bound_s=75,
        also_host=True,
    ),
    "tests": Part("Tests", ("what", "outcome"), tests, bound_s=150),
}
"""By name, in their order."""


if __name__ == "__main__":
    cli.run(main, GpuSettings, "Everything once on a GPU, in under eight minutes.")
