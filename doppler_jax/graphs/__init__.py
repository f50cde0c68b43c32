"""Task graphs on the host: built, read, measured, drawn at random, padded for `jit`.

`build.py` makes and checks a graph and puts tasks in order; `formats.py` reads and writes
files and NetworkX graphs; `levels.py` has b-levels, t-levels, paths and the lower bound;
`relatives.py` which tasks belong together; `families.py` random graphs; `pipelines.py` training
steps in stages, and schedules of them written by hand. `padded.py` is what compiled code takes
(graph and costs in arrays of bucketed sizes), `chains.py` the cover by few chains that it uses.

Another file format goes into `formats.py`, another random family into `families.py`.
"""

from doppler_jax.graphs.formats import load_stg, save_graph
from doppler_jax.graphs.levels import b_level, b_path, t_level, t_path
from doppler_jax.types import RESIDENT, TaskGraph

__all__ = [
    "RESIDENT",
    "TaskGraph",
    "b_level",
    "b_path",
    "load_stg",
    "save_graph",
    "t_level",
    "t_path",
]
