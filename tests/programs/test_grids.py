"""The uniform strategy cuts the largest dimensions, evenly, and contractions by its rule."""

import pytest

from doppler_jax.programs.grids import choose_counts, uniform_counts
from doppler_jax.programs.rules import Labelling


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


def test_contraction_takes_the_larger_count_of_its_operands():
    # [4, 16] by [16, 64]: the left operand would cut the contracted dimension in 4.
    labelling = Labelling(
        sizes=(4, 16, 64), operands=((0, 1), (1, 2)), result=(0, 2), flops=2.0, aggregate="sum"
    )
    assert choose_counts(labelling, (None, None), 4) == {0: 1, 1: 4, 2: 4}


def test_largest_produced_operand_is_followed():
    labelling = Labelling(
        sizes=(8, 8, 1), operands=((0, 1), (0, 1), (0, 2)), result=(0, 1), flops=1.0
    )
    assert choose_counts(labelling, (None, (1, 4), (2, 1)), 4) == {0: 1, 1: 4, 2: 1}
    # Labels that the followed operand lacks share what is left of the budget.
    assert choose_counts(labelling, (None, None, (2, 1)), 8) == {0: 2, 1: 4, 2: 1}
    assert choose_counts(labelling, (None, None, None), 4) == {0: 2, 1: 2, 2: 1}


def test_empty_tensors_are_not_cut():
    labelling = Labelling(sizes=(8, 0), operands=((0,),), result=(0, 1), flops=0.0)
    assert choose_counts(labelling, ((4,),), 4) == {0: 1, 1: 1}
