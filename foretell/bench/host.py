"""The machine that a measurement ran on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from foretell.machine import cores


def host() -> dict[str, Any]:
    """Its processor's name, as the system gives it, and the cores that this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"processor": named[0] if named else platform.processor() or platform.machine(), "cores": cores()}
