"""What a call takes beside its tasks and transfers, so that whole calls can be simulated."""

import dataclasses

import numpy as np

from doppler_jax.types import ShardedProgram, TensorRef


@dataclasses.dataclass(frozen=True)
class CallCosts:
    """Seconds of a call's chores, as `dj.engine.measure_calibration` fits them if asked to."""

    call_s: float
    """Of any call."""
    task_s: float
    """Of each task: its times are told, and put together."""
    lay_s: float
    """Of each block of an argument that is laid anew: neither resident nor carried."""
    lay_s_per_byte: float
    output_s: float
    """Of each block of an output that is handed over: it is not carried."""
    output_s_per_byte: float
    join_s: float
    """Of each block of an output that has several, besides."""
    join_s_per_byte: float

    def beyond_s(self, sharded: ShardedProgram) -> float:
        """Returns by how much a whole call of a program takes longer than its makespan."""
        return float(amounts(sharded) @ dataclasses.astuple(self))


def amounts(sharded: ShardedProgram) -> np.ndarray:
    """Returns how often a call of a program does each of what `CallCosts` has, `[8]`."""
    graph, carried = sharded.graph, {o for _, o in sharded.carried}
    is_laid = ~graph.is_resident & (np.asarray(graph.input_maker) < 0)
    outputs = [
        [ref.tensor for ref in output.blocks if isinstance(ref, TensorRef)]
        for o, output in enumerate(sharded.outputs)
        if o not in carried
    ]
    joined = [blocks for blocks in outputs if len(blocks) > 1]

    def handed(given: list[list[int]]) -> tuple[int, float]:
        blocks = [x for output in given for x in output]
        return len(blocks), float(np.asarray(graph.tensor_bytes)[blocks].sum())

    laid = is_laid.sum(), np.asarray(graph.input_bytes)[is_laid].sum()
    return np.array([1.0, graph.num_tasks, *laid, *handed(outputs), *handed(joined)])


def fit_calls(rows: np.ndarray, seconds: np.ndarray) -> CallCosts:
    """Returns the costs, none below 0, by which calls took what they did beyond makespans.

    Minimises the squares of relative errors, so that long calls and short ones count alike.

    Args:
      rows: `[K, 8]` amounts of each program.
      seconds: `[K]` by which its calls took longer than their makespans, positive.
    """
    from scipy.optimize import nnls

    relative = rows / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), np.finfo(np.float64).tiny)  # bytes are millions
    found, _ = nnls(relative / scale, np.ones(len(seconds)))
    return CallCosts(*(found / scale).tolist())
