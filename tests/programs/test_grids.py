"""The uniform strategy cuts the largest dimensions, evenly, and contractions by its rule."""

import jax
import jax.numpy as jnp
import pytest

from doppler_jax import trace
from doppler_jax.programs.fuse import fuse
from doppler_jax.programs.grids import choose_counts, max_counts, plan_uniform, uniform_counts
from doppler_jax.programs.rules.labels import Labelling


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
    # A first group of labels is cut before the next.
    assert uniform_counts({0: 2, 1: 64}, ((0,), (1,)), 8) == (2, 4)


def labelling(sizes, operands, result, aggregate=None):
    return Labelling(sizes, operands, (result,), flops=1.0, aggregate=aggregate)


PRODUCT = labelling((4, 16, 64), ((0, 1), (1, 2)), (0, 2), "sum")
# A bias [64] shares no label with the left operand, so that nothing would be batch.
WITH_BIAS = labelling((4, 16, 8, 8), ((0, 1, 2), (0, 2, 3), (3,)), (0, 1, 3), "sum")
REDUCTION = labelling((8, 8), ((0, 1), (0,)), (0,), "sum")
POINTWISE = labelling((8, 8, 1), ((0, 1), (0, 1), (0, 2)), (0, 1))
EMPTY = labelling((8, 0), ((0,),), (0, 1))


@pytest.mark.parametrize(
    ("group", "num_root_operands", "stored", "num_shards", "counts"),
    [
        # [4, 16] by [16, 64]: the left operand would cut the contracted dimension in 4.
        (PRODUCT, 2, (None, None), 4, (1, 4, 4)),
        # Operands of the epilogue have no say in a contraction.
        (WITH_BIAS, 2, (None, None, (8,)), 4, (4, 1, 1, 1)),
        # A reduction with an epilogue follows its operand.
        (REDUCTION, 1, ((2, 2), None), 4, (2, 2)),
        # The largest operand that was made is followed.
        (POINTWISE, 3, (None, (1, 4), (2, 1)), 4, (1, 4, 1)),
        # Labels that the followed operand lacks share what is left of the budget.
        (POINTWISE, 3, (None, None, (2, 1)), 8, (2, 4, 1)),
        (POINTWISE, 3, (None, None, None), 4, (2, 2, 1)),
        # Empty tensors are not cut.
        (EMPTY, 1, ((4,),), 4, (1, 1)),
    ],
)
def test_counts_of_a_group(group, num_root_operands, stored, num_shards, counts):
    found = choose_counts(group, num_root_operands, stored, num_shards)
    assert found == dict(enumerate(counts))


def test_labels_that_must_stay_whole_are_not_cut():
    sort = Labelling((8, 16), ((0, 1),), ((0, 1), (0, 1)), 1.0, fixed=frozenset({1}))
    assert max_counts(sort) == {0: 8, 1: 1}
    assert choose_counts(sort, 1, (None,), 4) == {0: 4, 1: 1}
    assert choose_counts(sort, 1, ((1, 4),), 4) == {0: 4, 1: 1}
    # Without a way to combine partial results, a label that the result lacks stays whole.
    gather = labelling((8, 16), ((0, 1),), (1,))
    assert max_counts(gather) == {0: 1, 1: 16}
    whole = Labelling((8,), ((0,),), ((0,),), 1.0, whole=True)
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
