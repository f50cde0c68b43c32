"""Records of experiments, computed once and kept."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from doppler_jax.files import parse_json_object, read_text, write_json_atomic
from experiments.provenance import provenance


@dataclasses.dataclass(frozen=True)
class Cells:
    """Records in a folder, one file each; a record made with another budget does not count."""

    folder: pathlib.Path

    def find(self, name: str, terms: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the record of this name made on these terms, None if there is none."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        record = parse_json_object(path, read_text(path))
        return record if record.get("terms") == terms else None

    def get(
        self, name: str, terms: dict[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Returns the record of this name made on these terms, making it if there is none."""
        record = self.find(name, terms)
        if record is not None:
            return record
        return self.keep(name, terms, {"commit": provenance()["commit"], **make()})

    def keep(self, name: str, terms: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        """Writes a record, and returns it with its name and terms."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {"cell": name, "terms": terms, **made}
        write_json_atomic(self.folder / f"{name}.json", record)
        return record
