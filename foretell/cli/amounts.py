"""Numbers as people write them on a command line: several with commas, tables, and sizes with units."""

from __future__ import annotations

import re

_STEPS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_STEPS |= {f"{step}i": 1024.0 ** (i + 1) for i, step in enumerate("kmgtp")}
_AMOUNT = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?)\s*([kmgtp]i?)?(b|flops?)?(/s)?", re.IGNORECASE)


def decimals(name: str, text: str) -> list[float]:
    """ValueError if the option of that name was given something else."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} takes a number, or several with commas between them, not {text!r}") from None


def points(name: str, text: str) -> dict[float, float]:
    """ "1=12.5,4=18"; a number alone is the value at 1. ValueError for anything else."""
    found: dict[float, float] = {}
    for part in text.split(","):
        x, equals, y = part.partition("=") if "=" in part else ("1", "=", part)
        try:
            found[float(x)] = float(y)
        except ValueError:
            raise ValueError(f"{name} takes a number, or pairs as in 1=12.5,4=18,8=31, not {text!r}") from None
    return found


def amount(name: str, text: str) -> float:
    """ "4.8TB/s", "12GiB", "990T", "16e9". ValueError for anything else."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{name} takes a number with or without a unit, as in 12GiB or 4.8TB/s, not {text!r}")
    return float(match[1]) * _STEPS[(match[2] or "").lower()]


def count(name: str, text: str) -> float:
    """ "8B", "135M", "8e9": of parameters, whose B is a billion."""
    return amount(name, re.sub(r"(?i)b$", "G", text.strip()))


def size(value: float) -> str:
    """In binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
