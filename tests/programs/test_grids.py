"""The uniform strategy cuts the largest dimensions, evenly, and contractions by its rule."""

import jax
import jax.numpy as jnp
import pytest

from doppler_jax.programs import trace
from doppler_jax.programs.fuse import fuse
from doppler_jax.programs.grids import choose_counts, max_counts, plan_uniform, uniform_counts
from doppler_jax.programs.labelling import Labelling


@pytest.mark.parametrize(
    ("shape", "num_shards", "grid"),
    [
        ((), 4, ()),
        ((8,), 4, (4,)),
        ((2,), 4, (2,)),
        ((8, 8), 1, (1, 1)),
        ((8, 8), 2, (2, 1)),
        ((8, 8), 4, (2, 2)),
        ((8, 8), 8, (4, 2)),
        ((4, 16), 4, (1, 4)),
        ((8, 16), 4, (2, 2)),
        ((7, 6), 4, (1, 2)),
        ((12, 7), 8, (4, 1)),
        ((3, 5), 8, (1, 1)),
        ((1, 8, 1), 4, (1, 4, 1)),
    ],
)
def test_uniform_counts(shape, num_shards, grid):
    dims = tuple(range(len(shape)))
    assert uniform_counts(dict(enumerate(shape)), (dims,), num_shards) == grid


def test_first_group_is_cut_first():
    assert uniform_counts({0: 2, 1: 64}, ((0,), (1,)), 8) == (2, 4)


CONTRACTION = Labelling(
    sizes=(4, 16, 64), operands=((0, 1), (1, 2)), results=((0, 2),), flops=2.0, aggregate="sum"
)


def test_contraction_takes_the_larger_count_of_its_operands():
    # [4, 16] by [16, 64]: the left operand would cut the contracted dimension in 4.
    assert choose_counts(CONTRACTION, 2, (None, None), 4) == {0: 1, 1: 4, 2: 4}


def test_operands_of_the_epilogue_have_no_say_in_a_contraction():
    # A bias [64] shares no label with the left operand, so that nothing would be batch.
    with_bias = Labelling(
        sizes=(4, 16, 8, 8),
        operands=((0, 1, 2), (0, 2, 3), (3,)),
        results=((0, 1, 3),),
        flops=2.0,
        aggregate="sum",
    )
    counts = choose_counts(with_bias, 2, (None, None, (8,)), 4)
    assert counts == {0: 4, 1: 1, 2: 1, 3: 1}


def test_a_reduction_with_an_epilogue_follows_its_operand():
    reduction = Labelling(
        sizes=(8, 8), operands=((0, 1), (0,)), results=((0,),), flops=1.0, aggregate="sum"
    )
    assert choose_counts(reduction, 1, ((2, 2), None), 4) == {0: 2, 1: 2}


def test_largest_produced_operand_is_followed():
    labelling = Labelling(
        sizes=(8, 8, 1), operands=((0, 1), (0, 1), (0, 2)), results=((0, 1),), flops=1.0
    )
    assert choose_counts(labelling, 3, (None, (1, 4), (2, 1)), 4) == {0: 1, 1: 4, 2: 1}
    # Labels that the followed operand lacks share what is left of the budget.
    assert choose_counts(labelling, 3, (None, None, (2, 1)), 8) == {0: 2, 1: 4, 2: 1}
    assert choose_counts(labelling, 3, (None, None, None), 4) == {0: 2, 1: 2, 2: 1}


def test_empty_tensors_are_not_cut():
    labelling = Labelling(sizes=(8, 0), operands=((0,),), results=((0, 1),), flops=0.0)
    assert choose_counts(labelling, 1, ((4,),), 4) == {0: 1, 1: 1}


def test_labels_that_must_stay_whole_are_not_cut():
    sort = Labelling(
        sizes=(8, 16),
        operands=((0, 1),),
        results=((0, 1), (0, 1)),
        flops=1.0,
        fixed=frozenset({1}),
    )
    assert max_counts(sort) == {0: 8, 1: 1}
    assert choose_counts(sort, 1, (None,), 4) == {0: 4, 1: 1}
    assert choose_counts(sort, 1, ((1, 4),), 4) == {0: 4, 1: 1}
    # Without a way to combine partial results, a label that the result lacks stays whole.
    gather = Labelling(sizes=(8, 16), operands=((0, 1),), results=((1,),), flops=1.0)
    assert max_counts(gather) == {0: 1, 1: 16}
    whole = Labelling(sizes=(8,), operands=((0,),), results=((0,),), flops=1.0, whole=True)
    assert choose_counts(whole, 1, ((4,),), 4) == {0: 1}


def test_uniform_plan_passes_grids_on_and_keeps_what_is_pinned():
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    groups = fuse(trace(lambda a: jnp.sum(a @ a, axis=0), square))
    product, total = groups
    free, kept = product.labelling.results[0]
    plan = plan_uniform(groups, 4, {})
    assert [plan[0][label] for label in (free, kept)] == [2, 2]
    assert plan[1] == dict(zip(total.labelling.operands[0], (2, 2), strict=True))
    plan = plan_uniform(groups, 4, {0: {free: 1, kept: 4}})
    assert [plan[0][label] for label in (free, kept)] == [1, 4]
    assert plan[1] == dict(zip(total.labelling.operands[0], (1, 4), strict=True))
