"""What drafters keep on disk: arrays, written whole or not at all, read only if whole."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from foretell.models.files import replacing


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    with replacing(path) as fresh, fresh.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path, *names: str) -> dict[str, np.ndarray] | None:
    """None if the file is not there, not whole, or holds something else."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
