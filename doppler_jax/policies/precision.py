"""The precision of the policies' products."""

from functools import partial

import jax

full_precision = partial(jax.default_matmul_precision, "highest")
"""A context in which products are of float32 numbers as they are.

GPUs round them to ten bits by default (TF32). That is too coarse for sums that a draw falls
into, and for PLC's rules that tell starts apart by 1e-4.
"""
