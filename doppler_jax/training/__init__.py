"""Training: three stages for one problem, and pretraining of one policy for many.

Read `state.py` (what goes from update to update) and `loop.py` (a phase, its budget, its
folder) first: everything that trains runs on these. An update is

* `imitation.py`   stage 1, the critical-path teacher;
* `sim_rl.py`      stage 2, policy gradient in the simulator, with `tempering.py` beside it;
* `system_rl.py`   stage 3, on times measured in pairs (`paired.py`) on real devices;
* `pretrain.py`    the base policy, on the problems of `pools.py`.

`reinforce.py` has the losses and steps that they share, `devices.py` cuts an update over local
devices, `checkpoint.py` puts a state on disk. `stages.py` runs the stages in folders, with the
`settings.py` of their commands; stage 3's command is `engine/stage3.py`.

Another kind of training is another `Phase`; a learned method is a learner, see `learners/`.
"""
