import jax
import numpy as np
import pytest

from doppler_jax.training import state
from doppler_jax.training.state import Elites

update_elites = jax.jit(state.update_elites)
NUM_ELITES, TASKS = 4, 6


def rows(count, first):
    """Placements that can be told apart: each of one device, numbered from `first`."""
    return np.repeat(np.arange(first, first + count, dtype=np.int32)[:, None], TASKS, axis=1)


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ([np.inf] * 4, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3]),
        ([1, 3, 5, 7], [2, 9, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 5]),
        ([1, 3, 5, 7], [3, 3, 3, 3, 3, 3, 4, 9, 1, 6], [1, 3, 4, 5]),
        ([1, 2, 3, 4], [9, 9, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 4]),
        ([np.inf] * 4, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2], [2, np.inf, np.inf, np.inf]),
        # More repeats of the best than the archive has places must not crowd out the rest.
        ([np.inf] * 4, [2, 2, 2, 2, 2, 2, 5, 4, 3, 6], [2, 3, 4, 5]),
        ([1, np.inf, np.inf, np.inf], [np.inf] * 9 + [2], [1, 2, np.inf, np.inf]),
        ([], [3, 2, 1, 3, 2, 1, 3, 2, 1, 0], []),
    ],
)
def test_the_best_are_kept_without_repeats(old, new, kept):
    archive = Elites(placement=rows(len(old), first=100), makespan_s=np.array(old, np.float32))
    makespan_s = np.array(new, np.float32)
    found = update_elites(archive, rows(len(new), first=0), makespan_s)
    assert found.makespan_s.tolist() == kept
    for placement, value in zip(found.placement, kept, strict=True):
        if value in old and value < np.inf:
            assert (placement == 100 + old.index(value)).all()
        elif value < np.inf:
            assert (placement == new.index(value)).all()
