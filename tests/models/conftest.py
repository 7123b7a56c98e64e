"""The built-in model, fetched once into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.models import hub


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return hub.resolve("smollm2-135m-instruct")
