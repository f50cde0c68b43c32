"""Everything once on a GPU, in under eight minutes: `make gpu`, or `python -m experiments.gpu`.

The engine on a GPU and a CPU as two unequal devices, what moving data costs, the throughput of
simulator and training, and the tests whose outcome a GPU may change. Every part is a command,
a process of its own with a bound of its own: one that fails or runs out of time says so on the
page, with what it had done. `--platform cpu` runs all of it on CPU devices at tiny sizes, so
that it works on the day there is a GPU.
"""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Literal

import jax

from doppler_jax import cli
from experiments import grid
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import run_apart
from experiments.tables import table

WHOLE_S = 450.0
"""Seconds for all parts together; a part gets what is left of it, at most its own bound."""

WRONG = ("FAILED", "DIFFERENT", "NOT FINISHED")
"""What the page says that should not be."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A command, and its sizes on a GPU and on CPU devices."""

    title: str
    command: str
    sizes: str
    tiny: str
    bound_s: float
    also_host: bool = False
    """Whether it runs once more on the host's cores, with a bound as long."""


PARTS = {
    "engine": Part(
        "The engine on two unequal devices, products in full float32",
        "experiments.engine --parts modes --backends unequal --rounds 5",
        "--workloads ffnn llama_block",
        "--workloads ffnn chainmm --preset small",
        bound_s=180,
    ),
    "moving": Part(
        "Dispatch and transfers",
        "experiments.engine --parts tasks transfers copies --backends unequal --rounds 5",
        "--tasks 200",
        "--tasks 20",
        bound_s=60,
    ),
    "simulator": Part(
        "Simulations",
        "experiments.bench --calls fifo in_order float32 --rounds 5",
        "--problems full_transformer_layer_261nodes --batches 65536 16384 2048 256",
        "--problems chainmm/small:p100x4 --batches 256",
        bound_s=80,
        also_host=True,
    ),
    "training": Part(
        "Training",
        "experiments.scaling --method doppler --rounds 5",
        "--sizes 256 --batch 256 2048",
        "--sizes 12 --batch 8",
        bound_s=75,
        also_host=True,
    ),
    # A warning, of another JAX say, is not what a GPU changes.
    "tests": Part(
        "Tests",
        "pytest -rfE -W default",
        "-n 12 --dist loadfile tests/policies tests/simulator",
        "-n 0 tests/policies/test_features.py",
        bound_s=150,
    ),
}
"""By name, in their order."""


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What to run, and where."""

    platform: Literal["gpu", "cpu"] = "gpu"
    """`cpu`: CPU devices in the GPU's place, at tiny sizes."""
    parts: tuple[str, ...] = tuple(PARTS)


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per part, and one more of those that the host's cores run, too."""
    asked = context.settings
    grid.check_names("--parts", asked.parts, list(PARTS))
    if asked.platform == "gpu" and jax.default_backend() != "gpu":
        raise ValueError(f"no GPU, JAX has {jax.devices()}; --platform cpu does without")
    stop_at = time.monotonic() + WHOLE_S * _slack(asked)
    return [
        Cell(
            {"part": name, "platform": asked.platform, "on_host": on_host},
            partial(run, context, name, on_host, stop_at),
        )
        for name in asked.parts
        for on_host in (False, True)[: 1 + PARTS[name].also_host]
    ]


def _slack(asked: Asked) -> int:
    """Returns what bounds are multiplied by: at tiny sizes other tests may have the cores."""
    return 4 if asked.platform == "cpu" else 1


def run(context: Context[Asked], name: str, on_host: bool, stop_at: float) -> Record:
    """Runs a part and returns what it says, and what went wrong if anything did."""
    asked, part = context.settings, PARTS[name]
    bound_s = min(part.bound_s * _slack(asked), max(stop_at - time.monotonic(), 1.0))
    sizes = part.tiny if asked.platform == "cpu" else part.sizes
    words = f"{part.command} {sizes}".split()
    # A test may be what runs this, and the part may run tests.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["JAX_PLATFORMS"] = "cpu" if on_host or asked.platform == "cpu" else "cuda,cpu"
    # Products in ten bits (TF32), as by default, would say nothing of equality.
    environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    with tempfile.TemporaryDirectory() as made:
        folder, module = pathlib.Path(made), words[0]
        if module != "pytest":
            words += ["--runs", made, "--shared", str(asked.shared.absolute())]
        command = [sys.executable, "-m", *words]
        status, _ = run_apart(command, bound_s, folder / "log", environment)
        said = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        page = [row for path in folder.glob("*/*.md") for row in path.read_text().splitlines()]
    lines = [line.strip("= ") for line in said if line.strip("= ")]
    if module == "pytest":
        failed = [line[:300] for line in lines[:-1] if line.startswith(("FAILED ", "ERROR "))]
        text = "\n".join(f"- {line}" for line in [*lines[-1:], *failed[:40]])
    else:  # without title, provenance and docstring
        rows = itertools.dropwhile(lambda line: not line.startswith(("## ", "| ")), page)
        text = "\n".join(rows)
    if status == 0:
        return {"text": text}
    print(*lines[-60:], sep="\n", file=sys.stderr)
    why = f"exit status {status}: {' '.join(lines[-1:])[:300]}"
    if status is None:
        why = f"out of time after {bound_s:.0f} s"
    return {"text": f"NOT FINISHED: {why}\n\n{text}"}


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns what the parts say."""
    versions = {"python": platform.python_version(), "GPU and driver": _driver()}
    versions["what JAX runs on"] = " ".join(jax.devices()[0].client.platform_version.split())
    versions |= {name: importlib.metadata.version(name) for name in ("jaxlib", "numpy")}
    rows = [{"what": what, "which": which} for what, which in versions.items()]
    texts = {"Versions": table(rows)}
    for record in records:
        title = PARTS[record["part"]].title + ", the host's cores alone" * record["on_host"]
        texts[title] = record["text"].replace("\n## ", "\n### ")
    return Page(texts)


def _driver() -> str:
    """Returns what the driver says of the GPU."""
    query = "--query-gpu=name,driver_version,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return " ".join(done.stdout.split())
    return "none"


STUDY = Study("gpu", Asked(again=True, publish=True), cells, report, quick={"platform": "cpu"})


def main(settings: Asked) -> None:
    """Runs the parts and writes the page; leaves with 1 if one failed or ran out of time."""
    # Several processes share the GPU, this one among them.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    STUDY.run(settings)
    page = (settings.runs / "gpu" / "gpu.md").read_text(encoding="utf-8")
    if any(word in page for word in WRONG):
        sys.exit("a part failed or ran out of time")


if __name__ == "__main__":
    cli.run(main, Asked, STUDY.title, default=STUDY.settings)
