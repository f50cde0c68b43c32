"""What all command lines share: settings from dataclasses, one line per user error."""

import sys
from collections.abc import Callable
from typing import Any

import tyro


def run(main: Callable[[Any], None], settings: Any, description: str) -> None:
    """Parses the command line into `settings`, a dataclass or a union of them, for `main`.

    A `ValueError` is a user's error: one line on standard error, exit code 2. Ctrl-C exits
    with 130, after `main` has saved what it saves.
    """
    parsed = tyro.cli(settings, description=description)
    try:
        main(parsed)
    except ValueError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
