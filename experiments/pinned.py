"""A process on cores of its own that times plain JAX when told to: `Pinned`.

What runs there has those cores and no others, like an isolated device. The child reads one
JSON request per line and answers with one line; requests to several children may overlap.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SHARDINGS = ("rows", "columns", "argument 0", "argument 1")
"""How arguments are sharded: all along their first, or their last, dimension that divides,
or one of them along its largest and the others replicated."""


class Pinned(contextlib.AbstractContextManager["Pinned"]):
    """The parent's end of a pinned process."""

    def __init__(self, cores: Sequence[int], num_devices: int = 1) -> None:
        command = [sys.executable, "-m", "experiments.pinned", json.dumps([*cores])]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment["JAX_NUM_CPU_DEVICES"] = str(num_devices)
        if len(cores) == 1:
            environment["NPROC"] = "1"
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> None:
        """Sends a request, see `_answer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        """Waits for the answer to the oldest request without one: seconds.

        Raises:
          RuntimeError: the process ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a pinned process ended with code {self._process.wait()}")
        return float(json.loads(line))

    def seconds(self, **request: Any) -> float:
        """Sends a request and waits for its answer."""
        self.ask(**request)
        return self.answer()

    def __exit__(self, *_: object) -> None:
        """Ends the process, which may be at work."""
        self._process.kill()
        self._process.communicate()


def main(cores: Sequence[int]) -> None:
    """Answers requests until there are no more."""
    os.sched_setaffinity(0, cores)
    runs: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        repeats = request.pop("repeats")
        key = json.dumps(request, sort_keys=True)
        if key not in runs:
            runs[key] = _make(**request)
            runs[key]()
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            runs[key]()
            seconds.append(time.perf_counter() - began)
        print(json.dumps(float(np.median(seconds))), flush=True)


def _make(
    matmul: int | None = None,
    workload: str = "",
    small: bool = False,
    sharding: str | None = None,
) -> Callable[[], Any]:
    """Returns what a request times: a product of squares, or a whole workload in one `jit`."""
    import jax
    import jax.numpy as jnp

    import doppler_jax as dj
    from experiments.engine_programs import make_named

    if matmul is not None:
        square = jnp.full((matmul, matmul), 0.5, jnp.float32)
        product = jax.jit(jnp.matmul)
        return lambda: product(square, square).block_until_ready()
    named = make_named(workload, small)
    args = dj.make_arrays(named, jax.random.key(0))
    if sharding is not None:
        args = _shard(args, sharding)
    fn = jax.jit(named.fn)
    return lambda: jax.block_until_ready(fn(*args))


def _shard(args: tuple[Any, ...], sharding: str) -> tuple[Any, ...]:
    """Returns the arguments laid over all devices, see `SHARDINGS`."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))

    def lay(array: jax.Array, which: Callable[[list[int]], int] | None) -> jax.Array:
        divisible = [i for i, n in enumerate(array.shape) if n % mesh.size == 0]
        names: list[str | None] = [None] * array.ndim
        if which is not None and divisible:
            names[which(divisible)] = "x"
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))

    if sharding in ("rows", "columns"):
        end = 0 if sharding == "rows" else -1
        return jax.tree.map(lambda array: lay(array, lambda found: found[end]), args)
    chosen = int(sharding.removeprefix("argument "))
    laid = []
    for i, arg in enumerate(args):
        for_each = (
            (lambda array: lay(array, lambda found: max(found, key=lambda k: array.shape[k])))
            if i == chosen
            else (lambda array: lay(array, None))
        )
        laid.append(jax.tree.map(for_each, arg))
    return tuple(laid)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
