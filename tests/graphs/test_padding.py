import pytest

from doppler_jax.graphs.padded import bucket_size


def test_values():
    assert [bucket_size(n) for n in range(1, 21)] == [
        *range(1, 9), 10, 10, 12, 12, 14, 14, 16, 16, 20, 20, 20, 20,
    ]  # fmt: skip
    assert [bucket_size(n) for n in (21, 25, 29, 33, 41, 229, 4097)] == [
        24, 28, 32, 40, 48, 256, 5120,
    ]  # fmt: skip


def test_nothing_takes_the_smallest():
    assert bucket_size(0) == 1
    assert bucket_size(0, smallest=8) == 8
    assert bucket_size(3, smallest=9) == 10
    assert bucket_size(11, smallest=8) == 12


def test_buckets_hold_their_sizes_and_waste_at_most_a_quarter():
    buckets = [bucket_size(n) for n in range(1, 5000)]
    for n, bucket in enumerate(buckets, start=1):
        assert n <= bucket <= 1.25 * n
        assert bucket_size(bucket) == bucket
    assert buckets == sorted(buckets)


@pytest.mark.parametrize("power", range(3, 12))
def test_four_buckets_to_each_doubling(power):
    sizes = range((1 << power) + 1, (2 << power) + 1)
    assert len({bucket_size(n) for n in sizes}) == 4
