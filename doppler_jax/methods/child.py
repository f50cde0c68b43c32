"""Work in a process of its own, whose results come as they are made, and which can be given up.

For what XLA compiles: that takes seconds, cannot be interrupted, and a thread that still
compiles aborts a process that ends. The programs that a child compiles are kept on disk, see
`doppler_jax.caches`.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from doppler_jax.caches import VARIABLE, keep_compiled_programs


class Child:
    """A process that runs `work(send, *given)`, where `send` takes what it has to say.

    Args:
      work: a function that can be imported: no lambda, and none of a script or notebook.
      given: its arguments, which are pickled.
      keep_compiled: whether what it compiles may be kept on disk.

    Raises:
      OSError: no process can be started.
    """

    def __init__(
        self, work: Callable[..., None], *given: Any, keep_compiled: bool = True
    ) -> None:
        # On CPUs: an accelerator's memory is its parent's.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        if not keep_compiled:
            environment[VARIABLE] = "off"
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from doppler_jax.methods import child; child.main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is its parent's
        )
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_over = False
        order = pickle.dumps(sys.path) + pickle.dumps((work, given))
        threading.Thread(target=self._talk, args=(order,), daemon=True).start()

    def _talk(self, order: bytes) -> None:
        """Sends the order and takes down what comes back until the child ends, in a thread."""
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            orders.write(order)
            orders.flush()
            while True:
                self._said.put(pickle.load(answers))
        self._said.put(_Over(self._process.wait()))
        for pipe in (orders, answers):
            with contextlib.suppress(OSError):  # what it did not read
                pipe.close()

    def receive(self, timeout_s: float = 0.0) -> Any | None:
        """Returns the next that the child had to say; None: nothing within that time.

        Raises:
          EOFError: it has ended.
          RuntimeError: it has failed; what it printed is on standard error.
        """
        if self._is_over:
            raise EOFError
        try:
            message = self._said.get(timeout=max(timeout_s, 1e-4))
        except queue.Empty:
            return None
        if isinstance(message, _Over):
            self._is_over = True
            if message.status:
                raise RuntimeError(f"a child process ended with status {message.status}")
            raise EOFError
        if isinstance(message, BaseException):
            self._is_over = True
            raise message
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()  # nobody waits until its memory is free, which may take long


def can_be_sent(thing: Any) -> bool:
    """Returns whether a child can unpickle something: not what a script or notebook defines."""
    try:
        return b"__main__" not in pickle.dumps(thing)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


class _Over:
    def __init__(self, status: int) -> None:
        self.status = status


def main() -> None:
    """Does what a parent orders on standard input, and answers on standard output."""
    orders, said = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed on the way is no answer

    def send(message: Any) -> None:
        pickle.dump(message, said)
        said.flush()

    sys.path[:] = pickle.load(orders)
    keep_compiled_programs()
    work, given = pickle.load(orders)
    # Without its parent nobody wants to know.
    threading.Thread(target=lambda: (orders.read(), os._exit(1)), daemon=True).start()
    try:
        work(send, *given)
    except ValueError as error:  # a user's: to be raised where the user is
        send(error)

    os._exit(0)  # threads of XLA may still be at work
