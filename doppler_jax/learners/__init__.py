"""Learned placement methods: DOPPLER, those it is compared with, and their common trainer.

Read `learner.py` first: what a `Learner` is, `train_learner`, and `EpisodeLearner`, which
needs only how it explores, a loss, and how it draws placements. Then `doppler.py`, and of the
rivals `gdp.py` (all tasks at once), `giph.py` (moves of a whole placement), `placeto.py` (task
by task), `stepwise.py` (DOPPLER's networks under one softmax, and encoded at every step).
`registry.py` has their names, and what the settings of their policies are.

To add one, write it in a file here, give it a row in `registry.LEARNERS` and its name in
`LEARNED` of `methods/registry.py`; `tests/learners/test_learner.py` then trains it, and saves
and loads its policies.
"""
