"""What an experiment runs on; see `doppler_jax.problems`."""

from doppler_jax.problems import (
    Chosen,
    choose,
    choose_graph,
    choose_workload,
    local_devices,
    saved_host,
    use_host_devices,
    workload_label,
)

__all__ = [
    "Chosen",
    "choose",
    "choose_graph",
    "choose_workload",
    "local_devices",
    "saved_host",
    "use_host_devices",
    "workload_label",
]
