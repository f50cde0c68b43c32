"""The tables and the picture of `experiments.zero_shot`."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from doppler_jax.reports.gantt import OTHER, PALETTE
from doppler_jax.reports.pictures import write_png
from doppler_jax.reports.tables import format_seconds, format_table


def tabulate_quality(
    groups: Mapping[str, Sequence[str]],
    clusters: Mapping[str, Sequence[str]],
    found: Mapping[str, Any],
) -> str:
    """Returns tables of ratios to the best makespan known: by group, by cluster, by graph.

    Of groups and clusters mean and worst, of the published graphs each; groups without
    problems are left out.

    Args:
      groups: the problems of each group, one of them `published`.
      clusters: the others, by what they are placed on.
      found: by problem, `best_s` and `makespan_s` by method.
    """
    held_out = [n for group, names in groups.items() if group != "published" for n in names]
    published = {name: [name] for name in groups.get("published", ())}
    texts = [
        "Makespan over the best known, mean (worst); seconds begin once compiled, other "
        "numbers are evaluations\n",
        _tabulate_ratios({**groups, "held out": held_out}, found),
        "The held-out ones by what they are placed on\n",
        _tabulate_ratios(clusters, found),
    ]
    if published:
        texts += ["The published ones\n", _tabulate_ratios(published, found)]
    return "\n".join(texts)


def _tabulate_ratios(groups: Mapping[str, Sequence[str]], found: Mapping[str, Any]) -> str:
    """Returns mean and worst ratio of every method in every group, or the one there is."""
    columns = {
        name if names == [name] else f"{name} ({len(names)})": names
        for name, names in groups.items()
        if names
    }
    rows = []
    for label in next(iter(found.values()))["makespan_s"]:
        cells = []
        for names in columns.values():
            ratio = np.array(
                [found[n]["makespan_s"][label] / found[n]["best_s"] for n in names]
            )
            worst = f" ({ratio.max():.4f})" if len(names) > 1 else ""
            cells.append(f"{ratio.mean():.4f}{worst}")
        rows.append((label, *cells))
    return format_table(("method", *columns), rows)


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
    columns = ("tasks", "features", "two greedy", "together", "first, with compilation")
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
