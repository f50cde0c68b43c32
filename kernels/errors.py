"""The one error by which an execution ends."""


class TaskError(RuntimeError):
    """A task or a transfer failed; says which, and keeps the cause as `__cause__`."""

    def __init__(self, what: str, task: int, device: int, cause: BaseException) -> None:
        lines = str(cause).strip().splitlines() or [""]
        reason = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        super().__init__(f"{what}: {type(cause).__name__}: {reason}")
        self.task = task  # that failed, or whose tensor could not be moved; -1 if none
        self.device = device  # position in `devices` of where it should have been
        self.__cause__ = cause
