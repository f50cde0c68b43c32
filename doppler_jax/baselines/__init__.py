"""Placement methods that do not learn or search: list schedulers, and exact answers.

Read `listing.py` first, the schedule that grows task by task, then `heft.py`; `peft.py` and
`cpop.py` go the same way. `critical_path.py` is the teacher of imitation. `etf.py` and
`m_sct.py` go by earliest start, the latter within memory; `fitting.py` knows what lies where.
`enumerative.py` places the tasks of an operation together; `simple.py` needs no insight, and
has `brute_force`, which tries every placement. `exact.py` proves optima.

A new baseline is a file here and a row in `methods/registry.py`.
"""
