"""How pictures get into files."""

import io
import os
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an import of matplotlib costs too much for those who draw nothing
    from matplotlib.figure import Figure


def write_png(path: str | os.PathLike[str], figure: "Figure") -> None:
    """Writes a figure as a PNG, which replaces an old one only when it is complete."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(picture.getvalue())
    temporary.replace(path)
