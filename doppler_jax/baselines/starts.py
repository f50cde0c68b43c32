"""Placements of list schedulers, which searches start from."""

import contextlib

import numpy as np

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.fitting import fit_some
from doppler_jax.baselines.heft import heft
from doppler_jax.baselines.m_etf import m_etf
from doppler_jax.costs.handling import as_transfers
from doppler_jax.types import Costs, TaskGraph


def listed_starts(graph: TaskGraph, costs: Costs, is_tight: bool) -> np.ndarray:
    """Returns the placements `[S, N]` of list schedulers that searches start from.

    Where memory `is_tight`, those come first that mind it or are made to fit.
    """
    costs = as_transfers(costs)
    placements = np.stack([critical_path(graph, costs), heft(graph, costs)]).astype(np.int64)
    if is_tight:
        placements = np.concatenate([fit_some(graph, costs, placements), placements])
        # Where m-ETF gives up a search may still find a placement that fits.
        with contextlib.suppress(ValueError):
            placements = np.concatenate([m_etf(graph, costs)[None], placements])
    return placements
