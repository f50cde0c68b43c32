"""Equality of task graphs, for the tests of readers and writers."""

import dataclasses

import numpy as np


def assert_same(graph, expected):
    """Every field of the two graphs has the same type and values, in the same order."""
    for field in dataclasses.fields(expected):
        value, wanted = getattr(graph, field.name), getattr(expected, field.name)
        np.testing.assert_array_equal(value, wanted, field.name, strict=True)
