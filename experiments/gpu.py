"""Everything once on a GPU, in under eight minutes: `make gpu`, or `python -m experiments.gpu`.

Versions, the engine on a GPU and a CPU as two unequal devices, what moving data costs, the
throughput of simulator and training, and the tests whose outcome a GPU may change. Every
part is a process of its own with a bound of its own, and the page is written after each: a
part that fails or runs out of time is a row that says so. `--platform cpu` runs all of it on
CPU devices at tiny sizes, so that it works on the day there is a GPU.
"""

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
from contextlib import contextmanager, suppress
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
from doppler_jax.reports.tables import format_table
from doppler_jax.simulator.simulate import simulate_padded
from doppler_jax.training.sim_rl import SimConfig, init_sim_state, sim_update

ROOT = pathlib.Path(__file__).resolve().parents[1]

WHOLE_S = 460.0
"""Seconds for all parts together; a part gets what is left of it, at most its own bound."""

WRONG = ("FAILED", "DIFFERENT")
"""What rows say that should not be."""

Rows = list[list[str]]
Program = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""Name, function and arguments."""


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
        blank = [""] * (len(PARTS[self.part].columns) - len(cells))
        with open(self.rows, "a", encoding="utf-8") as file:
            file.write(json.dumps([*map(str, cells), *blank]) + "\n")

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


def main(settings: GpuSettings) -> None:
    """Runs the parts and writes the page; leaves with 1 if one failed or ran out of time.

    Raises:
      ValueError: there is no part of a name.
    """
    names = settings.parts or tuple(PARTS)
    for name in names:
        if name not in PARTS:
            raise ValueError(f"unknown part {name!r}; known: {', '.join(PARTS)}")
    rows: dict[str, Rows] = {}
    graph, tiny = os.path.abspath(settings.graph), settings.platform == "cpu"
    slack = 4 if tiny else 1  # where other tests have the cores
    failed, stop_at = [], time.monotonic() + WHOLE_S * slack
    for name in names:
        part, rows[name], began = PARTS[name], [], time.monotonic()
        for on_host in (False, True)[: 1 + part.also_host]:
            bound_s = min(part.bound_s * slack, max(stop_at - time.monotonic(), 1.0))
            with tempfile.TemporaryDirectory() as folder:
                kept = pathlib.Path(folder, "rows")
                kept.touch()
                job = Job(name, str(kept), graph, settings.commit, tiny, on_host, bound_s)
                trouble = _run_apart(job, pathlib.Path(folder, "log"))
                lines = kept.read_text(encoding="utf-8").splitlines()
            rows[name] += map(json.loads, lines)
            if trouble or any(word in line for word in WRONG for line in lines):
                failed.append(name)
            if trouble:
                label = f"{name}{' on the host' if on_host else ''}: not finished"
                rows[name].append([label, trouble, *[""] * (len(part.columns) - 2)])
            _write_page(settings.output, rows)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    print(settings.output.read_text(encoding="utf-8"))
    if failed:
        sys.exit(f"failed or ran out of time: {', '.join(failed)}")


def _run_apart(job: Job, log: pathlib.Path) -> str:
    """Runs a job in a process of its own, with a log; returns what went wrong, or nothing."""
    # A test may be what runs this, and the part may run tests.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["JAX_PLATFORMS"] = "cpu" if job.on_host or job.tiny else "cuda,cpu"
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share the GPU in tests
    call = f"from experiments.gpu import Job; Job(**{dataclasses.asdict(job)}).run()"
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            [sys.executable, "-c", call],
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(job.bound_s)
            trouble = f"exit status {code}" if code else ""
        except subprocess.TimeoutExpired:
            trouble = f"out of time after {job.bound_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # it and all that it started have ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if trouble:
        said = log.read_text(encoding="utf-8", errors="replace").strip()
        print(said[-6000:], flush=True)
        last = said.splitlines()[-1:] if trouble.startswith("exit") else []
        trouble = ": ".join([trouble, *last])[:300]
    return trouble


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
    git = _output_of("git", "describe", "--always", "--dirty")
    smi = "--query-gpu=name,driver_version,memory.total"
    job.emit("commit", job.commit or git or "unknown")
    job.emit("date", time.strftime("%Y-%m-%d"))
    job.emit("device", f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    job.emit("host", f"{os.cpu_count()} cores")
    job.emit(
        "GPU and its driver", _output_of("nvidia-smi", smi, "--format=csv,noheader") or "none"
    )
    job.emit("what JAX runs on", " ".join(jax.devices()[0].client.platform_version.split()))
    for module in (jax, jaxlib, np):
        job.emit(module.__name__, module.__version__)
    job.emit("python", sys.version.split()[0])


def _output_of(*command: str) -> str:
    """Returns what a command printed, on one line; nothing if it failed or is not there."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return " ".join(done.stdout.split()) if done.returncode == 0 else ""


def engine(job: Job) -> None:
    """Runs two programs on two unequal devices: in every mode, and placed by us."""
    devices = _two_devices()
    local = dj.LocalDevices(devices)
    rounds = 2 if job.tiny else 5
    for name, fn, args in _programs(job.tiny):
        args = jax.device_put(args, devices[0])
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
    errors = jax.tree.map(_relative_error, jax.device_get(step(*args)), expected)
    error = max(jax.tree.leaves(errors))
    makespans_s, calls_s = [], []
    for _ in range(rounds):
        calls_s.append(_seconds(lambda: step(*args)))
        dj.validate(step.graph, step.trace)
        makespans_s.append(step.trace.finish_s.max())
    return (
        f"{'equal' if error < 1e-4 else 'DIFFERENT'} ({error:.0e})",
        f"valid, {step.graph.num_tasks} tasks",
        f"{1e3 * np.median(makespans_s):.2f}",
        f"{1e3 * np.median(calls_s):.2f}",
    )


def _relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference as a share of the largest magnitude."""
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64))
    return float(difference.max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30))


def _programs(tiny: bool) -> Iterator[Program]:
    width = 64 if tiny else 2048

    def mlp(x: jax.Array, weights: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for up, down in weights:
            x = x + jax.nn.relu(x @ up) @ down
        return x

    rng = np.random.default_rng(0)
    x, *weights = rng.normal(0, width**-0.5, (9, width, width)).astype(np.float32)
    yield "MLP, 4 blocks", mlp, (x, list(zip(weights[::2], weights[1::2], strict=True)))
    sizes = {} if tiny else {"sequence": 512, "width": 1024, "hidden": 4096, "heads": 16}
    workload = dj.make_workload("chainmm" if tiny else "llama_block", "small", **sizes)
    yield workload.name, workload.fn, dj.make_arrays(workload, jax.random.key(1))


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

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(depth):
            x = x @ w
        return x

    eye = np.eye(8, dtype=np.float32)
    args = jax.device_put((eye, eye), devices[0])
    bare = jax.jit(lambda x, w: x @ w).lower(*args).compile()

    def bare_calls() -> jax.Array:
        x, w = args
        for _ in range(depth):
            x = bare(x, w)
        return x

    job.emit("tiny task, bare calls", _us(_median_s(bare_calls, 5) / depth), f"{depth} tasks")
    sharded = dj.partition(dj.trace(chain, *args), 1)
    tasks, local = sharded.graph.num_tasks, dj.LocalDevices(devices)
    for where, placement in (
        (f"on {devices[0]}", np.zeros(tasks, np.int32)),
        ("by turns on both", np.arange(tasks) % 2),
    ):
        for mode in local.modes:
            step = dj.compile(sharded, placement, devices=local, mode=mode)
            seconds = _median_s(partial(step, *args), 5) / tasks
            job.emit(f"tiny task, {mode}, {where}", _us(seconds), f"{tasks} tasks")


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
    rng = np.random.default_rng(0)
    for links in ("parallel", "serial"):
        for batch in (256,) if job.tiny else (65536, 16384, 2048, 256):
            placements = rng.integers(costs.num_devices, size=(batch, graph.num_tasks))
            call = (_host_call if job.on_host else _lockstep_call)(
                graph, costs, placements, links
            )
            first_s = _seconds(call)
            rate = f"{batch / _median_s(call, 2 if job.tiny else 5):,.0f}"
            way = "`dj.simulate`, float64" if job.on_host else "lock-step, float32"
            job.emit(f"{name}; {way}, {_where()}", links, f"{batch:,}", rate, f"{first_s:.1f}")


def _host_call(
    graph: dj.TaskGraph, costs: dj.Costs, placements: np.ndarray, links: str
) -> Callable[[], Any]:
    objective = dj.Objective(links=links)
    return lambda: dj.simulate(graph, costs, placements, objective=objective)


def _lockstep_call(
    graph: dj.TaskGraph, costs: dj.Costs, placements: np.ndarray, links: str
) -> Callable[[], Any]:
    padded = pad_problem(graph, costs)
    spare = padded.padded_tasks - graph.num_tasks
    rows = np.pad(placements, ((0, 0), (0, spare))).astype(np.int32)
    padded, rows = jax.device_put((padded, rows))
    return lambda: simulate_padded(padded, rows, links=links)


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
    what = (
        ["tests/policies/test_features.py"]
        if job.tiny
        else ["tests/policies", "tests/simulator"]
    )
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


@contextmanager
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


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def _median_s(call: Callable[[], Any], rounds: int) -> float:
    """Returns the median seconds of so many calls after one that does not count."""
    return float(np.median([_seconds(call) for _ in range(rounds + 1)][1:]))


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
