"""Small tables of results, as Markdown and on the terminal. Cells are ready-made text."""

import math
import sys
from collections.abc import Sequence

TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns (seconds per unit, name) of the largest of s, ms, us that `seconds` fills."""
    for unit in TIME_UNITS:
        if abs(seconds) >= unit[0]:
            return unit
    return TIME_UNITS[-1] if seconds else TIME_UNITS[0]


def format_seconds(seconds: float, digits: int = 4) -> str:
    """Returns a duration in s, ms or us with `digits` significant digits: `12.35 ms`.

    Digits before the decimal point are never cut: `format_seconds(12345.0)` is `12345 s`.
    """
    if not math.isfinite(seconds) or seconds == 0:
        return f"{seconds:.0f} s"
    scale, unit = time_unit(seconds)
    value = seconds / scale
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f} {unit}"


def byte_unit(num_bytes: float) -> tuple[float, str]:
    """Returns (bytes per unit, name) of the largest of GB, MB, kB, B that `num_bytes` fills."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if num_bytes >= unit[0]), (1.0, "B"))


def format_bytes(num_bytes: float) -> str:
    """Returns a size with three significant digits: `12.3 MB`."""
    scale, unit = byte_unit(num_bytes)
    return f"{num_bytes / scale:.3g} {unit}"


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, the first column left-aligned and the others right-aligned.

    Units belong into the headings: `("method", "makespan (ms)")`.

    Raises:
      ValueError: a row has another number of cells than there are columns.
    """
    _check_rows(columns, rows)
    rule = ["---"] + ["---:"] * (len(columns) - 1)
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in (columns, *rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *body))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table to standard output, aligned as by `format_table`; long cells fold.

    Raises:
      ValueError: a row has another number of cells than there are columns.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    _check_rows(columns, rows)
    # Text: rich would take the brackets of a plain "matmul[0,1]" for markup.
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(Text(title))
    console.print(table)


def _check_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for i, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(
                f"row {i} has {len(row)} cells for {len(columns)} columns: {tuple(row)}"
            )
