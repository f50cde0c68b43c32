"""Studies: problems x methods x budgets x seeds, their records, tables and results pages.

`python -m experiments` lists them, `python -m experiments.NAME` runs one. To read first:
`grid.py` (the runner), `catalogue.py` (a problem by its name), `machine.py` (devices and turns
where a study measures). A new study is a module with a `STUDY`, and a line here.
"""

STUDIES = {
    "search": "learning and direct search, at equal evaluations and at equal seconds",
    "transfer": "a policy trained on one graph, used on another",
}
"""Every study by name, and what it asks."""
