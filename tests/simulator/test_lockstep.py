"""Chunks, parts and platforms give the same; code for other platforms is tested on the CPU."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.graphs.padded import pad_problem
from doppler_jax.simulator import lockstep, simulate
from doppler_jax.simulator.chain_slots import UNROLL, run_chain_slots
from doppler_jax.simulator.in_hand import num_steps
from doppler_jax.simulator.simulate import WIDE, simulate_padded
from tests.equations import equations
from tests.generators import random_problem, wide_problem


@pytest.fixture(scope="module")
def case():
    """An padded, and 70 placements and priorities padded to it."""
    rng = np.random.default_rng(0)
    graph, costs = random_problem(rng, 20, 3)
    padded = pad_problem(graph, costs)
    columns = padded.padded_tasks + 1
    placements = rng.integers(0, 3, (70, columns)).astype(np.int32)
    return padded, placements, rng.random((70, columns)).astype(np.float32)


@pytest.mark.parametrize("serial", [False, True])
def test_other_platforms_run_the_same(case, serial):
    padded, placements, rank = case
    assert num_steps(padded) % UNROLL != 0  # so the last iteration has steps to spare
    compute_s = jnp.asarray(padded.compute_s).at[7].set(jnp.inf)
    stuck = dataclasses.replace(padded, compute_s=compute_s)
    run = partial(run_chain_slots, serial=serial, schedule=True)
    on_cpu = jax.jit(partial(lockstep._on_cpu, run, 64))
    elsewhere = jax.jit(partial(lockstep._elsewhere, run))
    for problem, ends in ((padded, True), (stuck, False)):
        expected_s, *expected = on_cpu((problem, None), placements, rank)
        assert np.isfinite(expected_s).all() == ends
        makespan_s, *times = elsewhere((problem, None), placements, rank)
        np.testing.assert_array_equal(makespan_s, expected_s)
        for found, wanted in zip(times, expected, strict=True):  # the last is of no task
            np.testing.assert_array_equal(found[:, :-1], wanted[:, :-1])


@pytest.mark.parametrize(("batch", "lanes"), [(1, 8), (24, 8), (25, 64), (70, 64), (300, 64)])
def test_batches_are_cut_as_suits_their_size(case, batch, lanes):
    _, placements, _ = case
    seen = []

    def run(shared, placement, rank, handling_s, *, native):
        if native:
            seen.append(placement.shape[0])
        return (placement.sum(1), placement[:, 1:] + shared)

    batch_placements = np.resize(placements, (batch, placements.shape[1]))
    arguments = (jnp.int32(3), batch_placements, None)
    total, shifted = jax.jit(partial(lockstep.run_batch, run))(*arguments)
    np.testing.assert_array_equal(total, batch_placements.sum(1))
    np.testing.assert_array_equal(shifted, batch_placements[:, 1:] + 3)
    assert set(seen) == {lanes}


def test_the_whole_run_is_one_kernel_on_the_cpu(case):
    padded, placements, _ = case
    compiled = simulate_padded.lower(padded, placements[:, :-1]).compile().as_text()
    assert 'xla_cpu_small_call="true"' in compiled
    assert "scatter" not in compiled


@pytest.mark.parametrize("links", ["parallel", "serial"])
def test_no_step_copies_a_table(links):
    # XLA copies a whole table where it may read it after writing: ten times the time.
    padded = pad_problem(*wide_problem(np.random.default_rng(0), 100, 3, 2))
    assert len(padded.chain_head) > WIDE[0]  # queues
    placements = np.zeros((70, 300), np.int32)
    compiled = simulate_padded.lower(padded, placements, links=links).compile().as_text()
    made = re.findall(r"= f32\[(\d+)\]\S* ([\w-]+)\(", compiled)
    of_tables = {operation for size, operation in made if int(size) > 70 * 300}
    assert "fusion" in of_tables  # tables are found, written in place
    assert "copy" not in of_tables


def test_loops_of_unknown_length_compile(case):
    # XLA aborted the process here while the kernel was given tables that it does not read.
    padded, placements, _ = case

    @jax.jit
    def repeatedly(padded, placements, times):
        def again(_, total):
            return total + simulate_padded(padded, placements).makespan_s

        return jax.lax.fori_loop(0, times, again, jnp.zeros(len(placements)))

    once = simulate_padded(padded, placements[:, :-1]).makespan_s
    np.testing.assert_array_equal(repeatedly(padded, placements[:, :-1], 2), once + once)


@pytest.mark.parametrize("width", [8, 100])  # for slots, for queues
def test_a_jit_may_close_over_everything(width):
    # XLA aborted the process when a kernel of queues got constants beside other operands.
    padded = pad_problem(*wide_problem(np.random.default_rng(0), width, 3, 2))
    placements = jnp.zeros((70, 3 * width), jnp.int32)
    expected = simulate_padded(padded, placements).makespan_s
    closed = jax.jit(lambda: simulate_padded(padded, placements).makespan_s)
    half = jax.jit(lambda p: simulate_padded(padded, p).makespan_s)
    np.testing.assert_array_equal(closed(), expected)
    np.testing.assert_array_equal(half(placements), expected)


def test_batched_calls_get_no_arrays_without_elements():
    # XLA aborted the process at such (jaxlib 0.11.2), where a batch is cut over devices.
    padded = pad_problem(*wide_problem(np.random.default_rng(0), 8, 3, 2))  # no inputs
    placements = np.zeros((70, padded.padded_tasks), np.int32)
    assert not all(np.size(leaf) for leaf in jax.tree.leaves(padded))
    cut = simulate.sharded(2)
    made = equations(lambda *given: cut(*given, None, None), padded, placements)
    calls = [
        e for e in made if e.primitive.name in ("custom_vmap_call", "optimization_barrier")
    ]
    assert len(calls) >= 2
    assert all(given.aval.size for call in calls for given in call.invars)
