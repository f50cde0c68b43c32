"""What `dj.explain` says of a sharded program, and the totals of a task graph by hand."""

import re

import jax
import jax.numpy as jnp
import pytest

import doppler_jax as dj
from doppler_jax.costs.clusters import reference_cluster
from doppler_jax.graphs.build import make_graph
from doppler_jax.programs.explain import parallelism
from tests.generators import small_graph


def attend(x, w):
    with jax.named_scope("attn"):
        q = x @ w
        with jax.named_scope("qk"):
            return jax.nn.relu(q @ q.T)


@pytest.fixture(scope="module")
def sharded():
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    return dj.partition(dj.trace(attend, x, w), 4)


def test_totals_and_parallelism_work_over_the_longest_path(sharded):
    graph, made_bytes = sharded.graph, sharded.graph.tensor_bytes.sum()
    summary = f"{graph.num_tasks} tasks, {graph.flops.sum():.4g} flops, {made_bytes:.4g} bytes "
    assert str(dj.explain(sharded)).startswith(f"{summary}made, parallelism ")
    # Two equal products side by side, then one that needs both.
    n = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    sharded = dj.partition(dj.trace(lambda a, b: (a @ b) @ (b @ a), n, n), 1)
    assert sharded.graph.num_tasks == 3
    assert "parallelism 1.50 " in dj.explain(sharded, dj.make_cluster("v100x8")).summary()


def test_every_task_has_its_scope_line_primitives_shapes_and_cost(sharded):
    line = attend.__code__.co_firstlineno + 4
    rows = dj.explain(sharded).task_rows()
    assert [row[0] for row in rows] == list(sharded.names)
    last = rows[-1]
    assert last[1].split()[:2] == ["dot_general", "max"]
    assert "test_explain.py" in last[5]
    assert f":{line}" in last[5]
    assert all(row[2].count(" -> float32[") == 1 for row in rows)
    for column, expected in ((3, sharded.graph.flops), (4, sharded.graph.tensor_bytes)):
        assert sum(float(row[column]) for row in rows) == pytest.approx(expected.sum(), 1e-3)
    scope = re.compile(r"attn(\.qk)?(?=\.[a-z_0-9]+[.\[])")
    assert {scope.match(name)[0] for name in sharded.names} == {"attn", "attn.qk"}


def test_every_tensor_has_its_partition_and_a_reason(sharded):
    rows = dj.explain(sharded).tensor_rows()
    by_shape = {row[1]: row for row in rows}
    assert set(by_shape) == {"float32[64,32]", "float32[64,64]"}
    for row in rows:
        blocks = [int(count) for count in row[2].split("x")]
        assert len(blocks) == 2
        assert row[4]
    text = str(dj.explain(sharded))
    assert all(cell in text for row in rows for cell in row)


def test_equal_operands_are_counted():
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    # The columns that are summed along have to be formed of the product's two halves.
    program = dj.trace(lambda x: jnp.cumsum(x @ x, axis=0), x)
    rows = dj.explain(dj.partition(program, 2, strategy="uniform")).task_rows()
    formations = [row[2] for row in rows if row[1] == "form"]
    assert formations
    assert all(shapes.startswith("2 x float32[8,16] -> float32[") for shapes in formations)


def test_totals_of_a_fork_and_of_nothing():
    # Task 0 feeds 1, 2 and 3; 1e10 flops are a second and so are 1e10 bytes.
    graph = small_graph([1e10, 2e10, 3e10, 4e10], [(0, 5e10, [1, 2, 3])])
    assert parallelism(graph, reference_cluster(3)) == pytest.approx(10 / 5)
    assert parallelism(make_graph(flops=[]), reference_cluster(2)) == 0.0
    one = jax.ShapeDtypeStruct((), jnp.float32)
    assert "0 tasks" in str(dj.explain(dj.partition(dj.trace(lambda x: x, one), 2)))
