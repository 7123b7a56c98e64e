"""Short files and short functions, counted in lines that hold a token: comments and docstrings are free."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest

import foretell

ROOT = Path(foretell.__file__).parent
FILE, FUNCTION, PARAMETERS, TOTAL = 300, 60, 6, 7080
FREE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def token_lines(path: Path) -> set[int]:
    """Numbers of the lines that hold a token outside docstrings."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in FREE]
    held = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return held


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_file_and_functions_are_short(path: Path) -> None:
    held = token_lines(path)
    assert len(held) <= FILE
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = sum(node.lineno <= line <= (node.end_lineno or node.lineno) for line in held)
        assert length <= FUNCTION, f"{node.name} has {length} lines"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in arguments)
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue  # a GPU's kernel knows nothing but its parameters
        # a constructor's keyword arguments are its configuration, and there is no other
        assert node.name == "__init__" or count <= PARAMETERS, f"{node.name} has {count} parameters"


def test_every_module_says_what_it_is_for() -> None:
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(ast.parse(text)), path


def test_total() -> None:
    """Of what decodes: what measures it, plans ahead of it and talks to a person is not counted."""
    beside = [ROOT / "planner" / name for name in ("offline.py", "given.py")]
    folders = ("bench", "cli", "report")
    core = [p for p in ROOT.rglob("*.py") if p not in beside and p.relative_to(ROOT).parts[0] not in folders]
    assert sum(len(token_lines(path)) for path in core) <= TOTAL
