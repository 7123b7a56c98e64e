"""What drafters keep on disk: arrays, written whole or not at all, read only if whole."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / path.name
        with fresh.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(fresh, path)


def read_arrays(path: Path, *names: str) -> dict[str, np.ndarray] | None:
    """None if the file is not there, not whole, or holds something else."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
