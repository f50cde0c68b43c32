"""Studies: problems x methods x budgets x seeds, their records, tables and results pages.

`python -m experiments` lists them, `python -m experiments.NAME` runs one. To read first:
`grid.py` (the runner), `catalogue.py` (a problem by its name), `methods.py` (cells of methods,
ours and your own), `tables.py`; `machine.py` (devices and turns) where a study measures,
`learning.py` where it trains; `yardsticks/`, what simulation is measured against. A new study
is a module with a `STUDY`, a line here and, once it has a page, one in docs/results/README.md.
"""

STUDIES = {
    "search": "what learning adds to direct search, at equal evaluations and at equal seconds",
    "transfer": "a policy of one graph or topology, used on another",
    "zero_shot": "the base policy where it was never trained",
    "ablation": "DOPPLER with one part taken out or changed",
    "table": "the paper's Table 2 and what barriers cost, simulated and measured",
    "gaps": "every method against known optima, and under memory limits",
    "stg": "the Standard Task Graph set within a second, beside its published optima",
    "scaling": "time of every learned method against the number of tasks",
    "partitions": "the planner's partitions against uniform ones",
    "distribute": "what distribute returns, beside jax.jit, in whole calls",
    "fidelity": "simulated against measured calls, and steps of loops",
    "orders": "what an order is worth, measured",
    "engine": "what the engine costs",
    "transports": "how tensors go from process to process, ours beside others'",
    "stage3_study": "what learning from measured times adds",
    "clock": "placing from the shell: how good, and how long past the bound",
    "plans": "what an order adds to a placement, and what wrong costs do to it",
    "pipelines": "training steps in a pipeline, beside schedules by hand",
    "gpu": "everything once on a GPU",
    "bench": "how fast simulation is, beside yardsticks",
}
"""Every study by name, and what it asks.

`demo`, `figures` and `code_size` are commands of their own.
"""
