"""Who may import whom. The table is the one of docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import foretell
from foretell.drafters import METHODS

ROOT = Path(foretell.__file__).parent
# what those above may see of the engine, and of the planner
ENGINE = ("engine.llm", "engine.measure", "engine.memory", "engine.request", "engine.stats")
PLANNER = ("planner.cost", "planner.given", "planner.offline")
ALLOWED: dict[str, tuple[str, ...]] = {
    "types": (),
    "machine": (),
    "kernels": ("machine",),
    "kv": ("types",),
    "sampling": ("types",),
    "verify": ("sampling", "types"),
    "scheduler": ("types",),
    "planner": ("types",),
    "models": ("kernels", "kv", "machine", "types"),
    "drafters": ("models", "kv", "types"),
    "engine": ("machine", "scheduler", "planner", "drafters", "verify", "sampling", "kv", "models", "types"),
    "bench": (*ENGINE, *PLANNER, "machine", "models", "kv", "types"),
    "report": (),
    "cli": ("bench", "report", *ENGINE, *PLANNER, "drafters", "verify", "models", "types"),
    "__init__": (*ENGINE, "drafters", "types"),
}
SHARED = ("base", "files", "grow", "index", "member", "passes", "reading", "search")  # of the package, for all drafters


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> list[str]:
    """["engine", "loop"] of foretell/engine/loop.py."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts


def imports(path: Path) -> list[str]:
    """Modules of foretell that the file imports, wherever in it, less the leading "foretell."."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found += whole if node.module == "foretell" else [node.module or ""]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name.removeprefix("foretell.") for name in found if name.split(".")[0] == "foretell"]


@pytest.mark.parametrize("path", modules(), ids=lambda path: ".".join(name_of(path)))
def test_imports_obey_the_table(path: Path) -> None:
    package, *rest = name_of(path)
    for imported in imports(path):
        top, *inner = imported.split(".")
        if top == package:
            assert package != "drafters" or not rest or inner[0] in SHARED, f"{path.name} imports {imported}"
            continue
        assert any(imported == name or imported.startswith(name + ".") for name in ALLOWED[package]), (
            f"{package} must not import {imported}"
        )


def test_a_method_is_called_by_name_in_one_place() -> None:
    for path in modules():
        compared = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare)]
        words = {c.value for node in compared for c in ast.walk(node) if isinstance(c, ast.Constant)}
        assert not words & (METHODS.keys() - {"auto", "none"}), path


@pytest.mark.parametrize("name", ["loop", "rows", "commit"])
def test_the_engine_never_asks_what_a_part_is(name: str) -> None:
    assert "isinstance" not in (ROOT / "engine" / f"{name}.py").read_text()
