"""What the README shows is true: its Python runs, its tree is the tree, its commands parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

import foretell
from foretell.cli import app

ROOT = Path(foretell.__file__).parent
README = (ROOT.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = blocks("python")
    assert len(code.strip().splitlines()) <= 10
    exec(compile(code, "README.md", "exec"), {})
    assert re.search(r"tokens per forward: \d", capsys.readouterr().out)


def test_tree_is_the_tree() -> None:
    [tree] = blocks("text")
    named = re.findall(r"^[├└]── (\S+) +\S", tree, flags=re.MULTILINE)
    there = [f"{path.name}/" if path.is_dir() else path.name for path in ROOT.iterdir()]
    assert sorted(named) == sorted(name for name in there if not name.startswith("__pycache__"))


def commands() -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    found = [re.search(r"\bforetell .*", line.partition("#")[0]) for line in lines]
    return [shlex.split(match.group()) for match in found if match]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_parse(words: list[str]) -> None:
    command = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    command.make_context("foretell", rest)


def test_make_targets_are_there() -> None:
    makefile = (ROOT.parent / "Makefile").read_text()
    for target in re.findall(r"^\$ make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
