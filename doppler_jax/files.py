"""Text and JSON files: errors that start with the path, writes that replace or do nothing."""

import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

PathLike = str | os.PathLike[str]


def read_text(path: PathLike) -> str:
    """Returns the text of a file.

    Raises:
      ValueError: there is no such file, it is a directory, it cannot be read, it is not
        text, or nothing is in it.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file (byte {error.start})") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    if "\0" in text:
        raise ValueError(f"{path}: not a text file (NUL at character {text.index(chr(0))})")
    if not text.strip():
        raise ValueError(f"{path}: the file is empty")
    return text


def parse_json_object(path: PathLike, text: str) -> dict[str, Any]:
    """Returns the JSON object in `text`, the content of `path`.

    Raises:
      ValueError: no valid JSON, no object, a field given twice, or NaN or Infinity,
        which JSON does not have.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"{path}: {where}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def read_fields(
    path: PathLike,
    kind: str,
    fields: Iterable[str],
    *,
    optional: Iterable[str] = (),
    text: str | None = None,
) -> dict[str, Any]:
    """Returns the JSON object in a file, which is of format `kind` and has these fields alone.

    Args:
      path: of the file.
      kind: its format; the version is 1.
      fields: their names.
      optional: names of those that may be missing.
      text: what is in the file, where it is known.

    Raises:
      ValueError: the file cannot be read, it is of another format or version, or a field is
        missing or unknown.
    """
    data = parse_json_object(path, read_text(path) if text is None else text)
    wanted = set(fields)
    for name, expected in (("format", kind), ("version", 1)):
        if data.get(name) != expected:
            found = repr(data[name]) if name in data else "nothing"
            raise ValueError(f"{path}: field {name!r}: expected {expected!r}, found {found}")
    for name in sorted(wanted ^ (set(data) - {"format", "version", *optional})):
        problem = "is missing" if name in wanted else "is unknown"
        raise ValueError(f"{path}: field {name!r} {problem}; expected {sorted(wanted)}")
    return data


def read_numbers(
    path: PathLike,
    data: dict[str, Any],
    name: str,
    *,
    ndim: int = 1,
    integers: bool = False,
    null: float | None = None,
) -> np.ndarray:
    """Returns field `name` of a JSON object, lists nested `ndim` deep, as an array.

    Args:
      path: where the object came from, for errors.
      data: the object.
      name: the field.
      ndim: depth of the lists.
      integers: whether only whole numbers are allowed (int64, otherwise float64).
      null: what a `null` stands for; without it a `null` is an error.

    Raises:
      ValueError: the field holds something else; the message names the entry.
    """
    kinds = (int,) if integers else (int, float)

    def convert(value: Any, where: str, depth: int) -> Any:
        if depth == 0:
            if value is None and null is not None:
                return null
            if isinstance(value, bool) or not isinstance(value, kinds):
                expected = "an integer" if integers else "a number"
                raise ValueError(f"{path}: {where} is {value!r}; expected {expected}")
            return value
        if not isinstance(value, list):
            raise ValueError(f"{path}: {where} is {value!r}; expected a list")
        return [convert(item, f"{where}[{i}]", depth - 1) for i, item in enumerate(value)]

    numbers = convert(data[name], name, ndim)
    try:
        array = np.array(numbers, dtype=np.int64 if integers else np.float64)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{path}: {name}: rows of unequal length, or a number too large"
        ) from error
    return array


def write_json_atomic(path: PathLike, data: Any) -> None:
    """Writes `data` as JSON; a reader sees the old file or all of the new one.

    Floats come back bit for bit.

    Raises:
      ValueError: the path cannot be written, or `data` holds NaN or an infinity.
    """
    try:
        text = json.dumps(data, allow_nan=False) + "\n"
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    write_text_atomic(path, text)


def write_text_atomic(path: PathLike, text: str) -> None:
    """Writes `text`; a reader sees the old file or all of the new one.

    Raises:
      ValueError: the path cannot be written.
    """
    target = pathlib.Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(f"{path}: {error.strerror or error}") from error


def write_fields(path: PathLike, kind: str, **fields: Any) -> None:
    """Writes what `read_fields` reads; see `write_json_atomic`."""
    write_json_atomic(path, {"format": kind, "version": 1, **fields})


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"field {name!r} is given twice")
        fields[name] = value
    return fields


def nulls(values: ArrayLike) -> Any:
    """Returns numbers, in lists if there are several, with None for what is not finite."""
    array = np.asarray(values, np.float64)
    return np.where(np.isfinite(array), array.astype(object), np.array(None)).tolist()
