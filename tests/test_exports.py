"""The public names: sorted, all there, all documented."""

from __future__ import annotations

import foretell


def test_all_is_sorted_and_complete() -> None:
    assert foretell.__all__ == sorted(foretell.__all__, key=lambda name: (not name.isupper(), name))  # ruff's order
    for name in foretell.__all__:
        assert getattr(foretell, name).__doc__, name


def test_nothing_else_is_public() -> None:
    classes = {name for name, value in vars(foretell).items() if isinstance(value, type)}
    assert classes == set(foretell.__all__)
