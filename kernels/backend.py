"""What a backend is: it places a program on devices and runs it there."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from doppler_jax.types import Schedule, ShardedProgram

from .plan import Plan
from .trace import Handling


@dataclasses.dataclass(frozen=True)
class Options:
    """How the calls of a placed program run."""

    mode: str = "work_conserving"
    check_nan: bool = False  # whether a NaN among a task's results ends the call
    timeout_s: float | None = None  # of one call
    out_device: int | None = None  # where outputs land; None: where their first block is


@dataclasses.dataclass(frozen=True)
class Execution:
    """One call: what it returned, when what ran, and how much memory it took."""

    outputs: list[jax.Array]  # flat, assembled from their blocks
    trace: Schedule  # seconds from the first dispatch; transfers of graph input i as ~i
    handling: Handling  # what devices themselves spent on transfers, on the trace's clock
    peak_bytes: np.ndarray  # [D] most that lay on each device at once, arguments included


class Loaded(Protocol):
    """A placed program on its devices."""

    compile_s: float  # spent on it, kernels compiled before not counted

    def lay(self, values: Sequence[Any]) -> Any:
        """Returns the flat arguments (`flatten_args`) laid on the devices that hold them.

        Resident ones stay there, and are found again if the next call brings the same array.
        """

    def run(self, laid: Any) -> Execution:
        """Returns one execution; what `lay` gave may be run again.

        Raises:
          TaskError: a task or transfer failed, a device was lost or time ran out.
        """


class Backend(Protocol):
    """Devices, and what runs programs on them."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Names of the ways of dispatch it knows."""

    @property
    def device_names(self) -> tuple[str, ...]:
        """`[D]`, for people to read."""

    @property
    def device_kinds(self) -> tuple[str, ...]:
        """`[D]`; devices of one kind are equally fast, but for what else runs on them."""

    def load(self, sharded: ShardedProgram, plan: Plan, options: Options) -> Loaded:
        """Returns the program ready to run, its kernels compiled; options are checked.

        Raises:
          ValueError: this backend cannot run the program.
          TaskError: a kernel does not compile.
        """
