"""The machine that a measurement ran on."""

from __future__ import annotations

from typing import Any

from foretell.machine import cores, processor


def host() -> dict[str, Any]:
    """Its processor's name, as the system gives it, and the cores that this process may use."""
    return {"processor": processor(), "cores": cores()}
