"""What an experiment leaves: a text of tables and its records, with where they come from."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from doppler_jax.files import write_json_atomic
from experiments.provenance import provenance


def write_results(folder: pathlib.Path, name: str, text: str, results: Any) -> None:
    """Prints a text, and writes it and its records as NAME.md and NAME.json."""
    print(text, flush=True)
    origin = provenance()
    stated = ", ".join(f"{key} {value}" for key, value in origin.items())
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(folder / f"{name}.json", {"provenance": origin, "results": results})
    made = f"{text}\nMade by `experiments.{name}`: {stated}.\n"
    (folder / f"{name}.md").write_text(made, encoding="utf-8")


def format_ms(middle_s: float, deviation_s: float) -> str:
    """Returns mean or median of runs, and their standard deviation, in ms: `12.35 ± 0.04`.

    Runs that agree, as those without chance do, have no deviation to show.
    """
    middle, deviation = 1e3 * middle_s, 1e3 * deviation_s
    decimals = max(0, 3 - math.floor(math.log10(max(middle, 1e-6))))
    spread = f" ± {deviation:.{decimals}f}" if deviation > 1e-6 * middle else ""
    return f"{middle:.{decimals}f}{spread}"


def star_least(texts: Sequence[str], values: Sequence[float], equal: float) -> list[str]:
    """Returns the texts with `*` behind those whose value is the least, up to a tolerance.

    Args:
      texts: of the values.
      values: nan where there is none.
      equal: relative difference up to which two values count as equal.
    """
    least = np.nanmin(np.asarray(values, np.float64))
    return [
        text + "*" * bool(value <= least * (1 + equal))
        for text, value in zip(texts, values, strict=True)
    ]
