"""What tasks and transfers cost, in seconds: from data sheets, from measurements, from traces.

Read `build.py` first: `make_costs` turns a cluster or a calibration into `Costs`, and
`check_costs` says what all of them satisfy. Clusters (`clusters.py`: presets and files;
`host.py`: this machine) have rates; a calibration (`calibration.py`) has the seconds of each
kernel, as measured by the engine. `observed.py` reads executions and refits costs to them.
`handling.py` knows what devices themselves spend on transfers, `digests.py` names kernels
and problems for good, `random_clusters.py` draws clusters to train on,
`dnn_partitioning.py` reads the networks of one paper.

A preset goes into the table of `clusters.py`; a field of `Costs` into `types.py`,
`check_costs` and the simulators.
"""

from doppler_jax.costs.build import check_costs
from doppler_jax.costs.observed import refit_costs

__all__ = [
    "check_costs",
    "refit_costs",
]
