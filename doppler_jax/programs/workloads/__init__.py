"""Named example functions of configurable size, to place, train on and measure.

* `workload`: what a workload is, and how its arguments are drawn.
* `networks`: a chain of products, a classifier and its training step, a mixture of experts,
  a residual block.
* `llama`: LLaMA's block, layer and whole model.
* `pipeline`: a training step of stages and micro-batches.
* `random_layered`: a random program of any size.

To add one, write a function from sizes to a `Definition` and enter it in the table below.
"""

from collections.abc import Callable, Mapping

from doppler_jax.programs.workloads import llama, networks, pipeline, random_layered
from doppler_jax.programs.workloads.workload import Definition, Workload, make_arrays

__all__ = ["Workload", "list_workloads", "make_arrays", "make_workload"]

Factory = Callable[..., Definition]
Presets = Mapping[str, Mapping[str, int]]

_WORKLOADS: dict[str, tuple[Factory, Presets]] = {
    "chainmm": (networks.chainmm, networks.CHAINMM_PRESETS),
    "ffnn": (networks.ffnn, networks.FFNN_PRESETS),
    "ffnn_train": (networks.ffnn_train, networks.FFNN_PRESETS),
    "llama": (llama.llama, llama.MODEL_PRESETS),
    "llama_block": (llama.llama_block, llama.BLOCK_PRESETS),
    "llama_layer": (llama.llama_layer, llama.LAYER_PRESETS),
    "moe_block": (networks.moe_block, networks.MOE_PRESETS),
    "pipeline": (pipeline.pipeline, pipeline.PRESETS),
    "random_layered": (random_layered.random_layered, random_layered.PRESETS),
    "resnet_block": (networks.resnet_block, networks.RESNET_PRESETS),
}
"""Factory and presets by name: `small` runs in milliseconds on a laptop; the larger tasks of
`medium` keep a core busy for milliseconds each; `paper` is for simulation, of the published
experiments' sizes where there are any."""


def list_workloads() -> list[str]:
    """Returns the names that `make_workload` knows, sorted."""
    return sorted(_WORKLOADS)


def make_workload(name: str, preset: str = "small", **sizes: int) -> Workload:
    """Returns a named workload at the preset's sizes, those given in `sizes` replaced.

    Raises:
      ValueError: no such workload, preset or size, or a size is not an integer that the
        workload can have.
    """
    if name not in _WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {list_workloads()}")
    factory, presets = _WORKLOADS[name]
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r} of {name}; known: {sorted(presets)}")
    known = presets[preset]
    for size, value in sizes.items():
        if size not in known:
            raise ValueError(f"unknown size {size!r} of {name}; known: {sorted(known)}")
        least = 0 if size == "seed" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"size {size} of {name} is {value!r}; expected an integer >= {least}"
            )
    sizes = {**known, **sizes}
    fn, arguments = factory(**sizes)
    return Workload(name, sizes, fn, arguments)
