"""Task graphs on the host: built, read, measured, drawn at random, padded for `jit`.

`build.py` makes and checks a graph and puts tasks in order; `formats.py` reads and writes
files and NetworkX graphs; `levels.py` has b-levels, t-levels, paths and the lower bound;
`relatives.py` which tasks belong together; `families.py` random graphs; `pipelines.py` training
steps in stages, and schedules of them written by hand. `padded.py` is what compiled code takes
(graph and costs in arrays of bucketed sizes), `chains.py` the cover by few chains that it uses.

Another file format goes into `formats.py`, another random family into `families.py`.
"""
