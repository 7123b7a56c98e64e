"""The native kernels: built once per machine with the system's C++ compiler, loaded through ctypes.

A machine without a compiler, or whose processor the source does not fit, gets None here and runs the PyTorch
operations instead (`models/ops.py`); nothing else of foretell knows which of the two is in use.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from foretell.machine import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
PARTS = sorted(SOURCE.parent.glob("*.hpp"))  # which it includes
FLAGS = (  # those of the variable CXXFLAGS follow
    "-O3",
    "-march=native",
    "-std=c++20",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
)

_I32, _I64, _F32, _PTR = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "ft_instructions": (ctypes.c_char_p, (_I32,)),
    "ft_layout": (None, (_I32, _PTR)),
    "ft_pool_new": (_PTR, (_I32,)),
    "ft_pool_free": (None, (_PTR,)),
    "ft_layers": (None, (_PTR, _PTR, _I64, _PTR, _PTR)),
    "ft_linear": (None, (_PTR, _PTR, _I64, _I64, _PTR, _I32, _I64, _I64, _PTR, _PTR, _PTR, _PTR)),
    "ft_embed": (None, (_PTR, _I32, _PTR, _PTR, _I64, _I64, _PTR)),
    "ft_norm": (None, (_PTR, _PTR, _PTR, _I64, _I64, _PTR, _F32, _PTR)),
    "ft_rope_write": (
        None,
        (_PTR, _PTR, _I64, _I64, _PTR, _PTR, _I64, _I64, _I64, _PTR, _PTR, _PTR, _PTR, _F32, _PTR, _PTR) + (_I64, _I32),
    ),
    "ft_paths": (_I64, (_PTR, _I64, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR)),
    "ft_attend": (
        None,
        (_PTR, _PTR, _I64, _PTR, _I64, _I64, _I64, _I64, _I64, _PTR, _PTR, _I64, _PTR, _PTR, _PTR, _PTR)
        + (_I64, _F32, _PTR, _PTR, _I64, _I32),
    ),
    "ft_swiglu": (None, (_PTR, _PTR, _I64, _I64, _PTR)),
    "ft_top": (None, (_PTR, _I64, _I64, _I64, _PTR, _PTR)),
    "ft_stream": (_I64, (_PTR, _PTR, _PTR, _I64)),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, built first if this machine has not built them yet; None where that is not possible."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or platform.system() == "Windows":
        return None
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        print(f"foretell: no native kernels here, PyTorch runs instead ({_reason(error)})", file=sys.stderr)
        return None
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _reason(error: Exception) -> str:
    lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _built(compiler: str) -> Path:
    """The path of the library for this source, compiler and processor."""
    flags = (*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")))
    digest = hashlib.sha256()
    sources = [path.read_bytes() for path in (SOURCE, *PARTS)]
    for part in (*sources, compiler.encode(), " ".join(flags).encode(), _processor()):
        digest.update(part + b"\0")
    folder = cache_folder() / "kernels"
    path = folder / f"{digest.hexdigest()[:20]}.so"
    if path.exists():
        return path
    if shutil.which(compiler) is None:
        raise FileNotFoundError(f"there is no compiler {compiler}")
    folder.mkdir(parents=True, exist_ok=True)
    print("foretell: building the native kernels (once on this machine)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / path.name
        command = [compiler, *flags, str(SOURCE), "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        os.replace(fresh, path)
    return path


def _processor() -> bytes:
    """What `-march=native` depends on: a cache folder shared between machines must not mix them up."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})).encode()
