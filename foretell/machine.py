"""What foretell asks of the machine it runs on: a folder for what it fetches or builds, cores, memory."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path


def cache_folder() -> Path:
    """`$FORETELL_CACHE`, else `foretell` under `$XDG_CACHE_HOME` or `~/.cache`; not created here."""
    own = os.environ.get("FORETELL_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "foretell"


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int:
    """Bytes of memory that are free now; 4 GiB where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 4 << 30


def give_back_memory() -> None:
    """Return what was freed to the system. glibc keeps it for later, in holes between what is still in use: 67 MB after
    loading 540 MB of weights. With another C library nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
