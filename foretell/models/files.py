"""Small text files, with errors that name the file; and files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """The file's text; ValueError if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if the file is missing, unreadable or holds something else."""
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what then becomes `path`: the file is there whole or not at all. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / path.name
        yield fresh
        os.replace(fresh, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as fresh:
        fresh.write_text(json.dumps(value), encoding="utf-8")
