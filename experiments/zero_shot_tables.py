"""The tables and the picture of `experiments.zero_shot`."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from doppler_jax.reports.gantt import OTHER, PALETTE
from doppler_jax.reports.pictures import write_png
from doppler_jax.reports.tables import format_seconds, format_table


def tabulate_quality(groups: Mapping[str, Sequence[str]], found: Mapping[str, Any]) -> str:
    """Returns the table of mean and worst ratios to the best makespan known, by group.

    Args:
      groups: the problems of each group; those without any are left out.
      found: by problem, `best_s` and `makespan_s` by method.
    """
    groups = {group: names for group, names in groups.items() if names}
    held_out = [n for group, names in groups.items() if group != "published" for n in names]
    columns = {f"{group} ({len(names)})": names for group, names in groups.items()}
    columns[f"held out ({len(held_out)})"] = held_out
    labels = list(next(iter(found.values()))["makespan_s"])
    rows = []
    for label in labels:
        cells = []
        for names in columns.values():
            ratio = np.array(
                [found[n]["makespan_s"][label] / found[n]["best_s"] for n in names]
            )
            cells.append(f"{ratio.mean():.4f} ({ratio.max():.4f})")
        rows.append((label, *cells))
    return (
        "Makespan over the best known, mean (worst); seconds begin once compiled, other "
        "numbers are evaluations\n\n" + format_table(("method", *columns), rows)
    )


def tabulate_clusters(ratios: Mapping[str, np.ndarray], families: Sequence[str]) -> str:
    """Returns how a policy's placements compare with HEFT's, by family and over all.

    Args:
      ratios: by kind of placement, `[B]` makespans over HEFT's.
      families: `[B]` of the graphs.
    """
    masks = {"all": np.ones(len(families), bool)}
    masks |= {f: np.array([g == f for g in families]) for f in sorted(set(families))}
    rows = [
        (
            kind,
            name,
            str(mask.sum()),
            f"{100 * (ratio[mask] <= 1 + 1e-9).mean():.0f}",
            *(f"{q:.3f}" for q in np.quantile(ratio[mask], (0.1, 0.5, 0.9, 1.0))),
        )
        for kind, ratio in ratios.items()
        for name, mask in masks.items()
    ]
    columns = (
        "placement",
        "family",
        "instances",
        "at or below HEFT (%)",
        "10%",
        "median",
        "90%",
        "worst",
    )
    return (
        "Makespans over HEFT's, 8 devices of unequal speed in two islands\n\n"
        + format_table(columns, rows)
    )


def tabulate_times(found: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the seconds of greedy placements as a table."""
    rows = [
        (
            f"{times['tasks']:,}",
            *(format_seconds(times[part], 3) for part in ("features_s", "greedy_s")),
            format_seconds(times["features_s"] + times["greedy_s"], 3),
            format_seconds(times["first_s"], 3),
        )
        for times in found.values()
    ]
    columns = ("tasks", "features", "greedy placement", "together", "first, with compilation")
    return "Zero-shot on one core, 4 devices\n\n" + format_table(columns, rows)


def plot_ratios(path: str | os.PathLike[str], ratios: Mapping[str, np.ndarray]) -> None:
    """Writes a PNG of how makespans over HEFT's, `[B]` by kind, are distributed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    bins = np.histogram_bin_edges(np.concatenate(list(ratios.values())), bins=40).tolist()
    for (kind, ratio), color in zip(ratios.items(), PALETTE, strict=False):
        axes.hist(ratio, bins=bins, color=color, histtype="step", linewidth=1.5, label=kind)
    axes.axvline(1.0, color=OTHER, linewidth=1)
    axes.set(xlabel="makespan over HEFT's", ylabel="instances")
    axes.legend(frameon=False)
    write_png(path, figure)
