"""The tutorial's code runs as it stands there, and its drafter is short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import foretell

PAGE = (Path(foretell.__file__).parent.parent / "docs" / "write-a-drafter.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "write-a-drafter.md", "exec"), names)
    out = capsys.readouterr().out
    first, second = map(float, re.findall(r"\d\.\d\d", out.splitlines()[0]))
    assert 1 <= first < 2 < second, "by then it knows the answer"
    assert "'pairs': '" in out and "'suffix': '" in out


def test_the_drafter_has_less_than_forty_lines() -> None:
    [drafter] = [node for node in ast.parse(BLOCKS[0]).body if isinstance(node, ast.ClassDef)]
    assert drafter.end_lineno is not None and drafter.end_lineno - drafter.lineno + 1 < 40
