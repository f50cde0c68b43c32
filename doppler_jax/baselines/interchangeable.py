"""Devices that may be exchanged without changing what any placement is worth."""

import numpy as np

from doppler_jax.types import RESIDENT, Costs, TaskGraph


def device_classes(graph: TaskGraph, costs: Costs) -> list[list[int]]:
    """Returns the classes of interchangeable devices, members ascending, by first member.

    Two devices are interchangeable if every task and every transfer costs the same after
    exchanging them, and neither is the home of a graph input that is read.
    """
    homes = set(np.asarray(graph.input_home)[graph.input_edge_input].tolist()) - {RESIDENT}
    classes: list[list[int]] = []
    for d in range(costs.num_devices):
        for members in classes:
            if not {d, members[0]} & homes and _exchangeable(costs, members[0], d):
                members.append(d)
                break
        else:
            classes.append([d])
    return classes


def first_use_order(
    placement: np.ndarray, classes: list[list[int]], order: np.ndarray
) -> np.ndarray:
    """Returns a placement `[N]` of equal worth whose classes are used in ascending order.

    Within a class, the device that the first task of `order` `[N]` runs on gets the
    smallest id, and so on.
    """
    renamed = np.arange(max(max(members) for members in classes) + 1)
    used = placement[order].tolist()
    for members in classes:
        seen = dict.fromkeys(d for d in used if d in members)
        renamed[[*seen, *(d for d in members if d not in seen)]] = members
    return renamed[placement]


def _exchangeable(costs: Costs, a: int, b: int) -> bool:
    exchanged = np.arange(costs.num_devices)
    exchanged[[a, b]] = b, a
    compute_s = np.asarray(costs.compute_s)
    if not np.array_equal(compute_s[:, a], compute_s[:, b]):
        return False
    if costs.capacity_bytes[a] != costs.capacity_bytes[b]:
        return False
    return all(
        np.array_equal(np.asarray(link)[np.ix_(exchanged, exchanged)], link)
        for link in (costs.latency_s, costs.seconds_per_byte)
    )
