"""Size buckets, so that graphs of similar size share one compilation."""


def bucket_size(size: int, smallest: int = 1) -> int:
    """Returns the least of 1, 2, ..., 8, 10, 12, 14, 16, 20, ... not below both arguments.

    Four steps to each doubling, so at most a quarter is padding.
    """
    size = max(size, smallest)
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return -(-size // step) * step
