"""A random layered program, for graphs of any size that no model happens to have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.programs.workloads.workload import Definition, normal, weight

PRESETS = {
    "small": {"num_tasks": 32, "seed": 0, "n": 64},
    "medium": {"num_tasks": 32, "seed": 0, "n": 512},
    "paper": {"num_tasks": 200, "seed": 0, "n": 4096},
}

_MAX_ADDED = 2


@dataclasses.dataclass(frozen=True)
class _Node:
    """One product: tanh(input @ weight + the sum of the added results)."""

    input: int | None  # node whose result is multiplied; None: the program's argument
    width: int  # columns of the result
    added: tuple[int, ...]  # nodes of earlier layers, of equal width


def random_layered(num_tasks: int, seed: int, n: int) -> Definition:
    """Returns a program of `num_tasks` products in random layers, each of another weight.

    A product multiplies a result of the layer before it, `[n, n / 2]`, `[n, n]` or
    `[n, 2 n]`, and may add results of earlier layers. Sums and tanh fuse into the
    products, so that cut into 1 shard the program has exactly `num_tasks` tasks. The
    outputs are the results that no product reads.

    Args:
      num_tasks: products.
      seed: of the program's structure.
      n: rows of every tensor, even.

    Raises:
      ValueError: `n` is odd.
    """
    if n % 2:
        raise ValueError(f"n is {n}; random_layered halves it, so it must be even")
    nodes = _draw_nodes(num_tasks, n, np.random.default_rng(seed))
    read = {i for node in nodes for i in (node.input, *node.added)}

    def fn(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        results: list[jax.Array] = []
        for number, (node, matrix) in enumerate(zip(nodes, weights, strict=True)):
            with jax.named_scope(f"node{number}"):
                total = (x if node.input is None else results[node.input]) @ matrix
                for other in node.added:
                    total = total + results[other]
                results.append(jnp.tanh(total))
        return [result for number, result in enumerate(results) if number not in read]

    rows = [n if node.input is None else nodes[node.input].width for node in nodes]
    weights = [weight(size, size, node.width) for size, node in zip(rows, nodes, strict=True)]
    return fn, (normal(n, n), weights)


def _draw_nodes(num_tasks: int, n: int, rng: np.random.Generator) -> list[_Node]:
    """Returns the nodes, layer by layer; a layer has up to about sqrt(num_tasks) nodes."""
    nodes: list[_Node] = []
    above: list[int] = []
    most = max(1, round(1.5 * num_tasks**0.5))
    while len(nodes) < num_tasks:
        first = len(nodes)
        size = min(int(rng.integers(1, most + 1)), num_tasks - first)
        for _ in range(size):
            width = int(rng.choice([n // 2, n, 2 * n]))
            fitting = [i for i in range(first) if nodes[i].width == width]
            count = min(int(rng.integers(_MAX_ADDED + 1)), len(fitting))
            added = rng.choice(fitting, size=count, replace=False).tolist() if count else []
            nodes.append(
                _Node(
                    input=int(rng.choice(above)) if above else None,
                    width=width,
                    added=tuple(sorted(added)),
                )
            )
        above = list(range(first, len(nodes)))
    return nodes
