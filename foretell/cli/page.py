"""Results as an HTML page beside the terminal: the same tables, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foretell.cli import report
from foretell.models.files import replacing
from foretell.report import plots
from foretell.report.page import Section, page

HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page with tables and plots too.")
]


def check(path: Path | None) -> None:
    """Before anything is measured: ValueError if the page could not be drawn or written."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"--html takes a file in a folder that there is, not {path}")
    plots.bars(plots.Axes("", "", ""), ["x"], [plots.Curve("", [1.0])])  # refuses where there is no matplotlib


def show(sections: Sequence[Section], console: Console) -> None:
    """Sections in a terminal, without their figures."""
    for section in sections:
        if section.table is not None:
            console.print()
            table = report.plain_table(*section.table.headers)
            for row in section.table.rows:
                table.add_row(*row)
            console.print(table)


def write(path: Path | None, title: str, intro: Sequence[str], sections: Sequence[Section]) -> None:
    """The page, if one was asked for. ValueError if the file cannot be written."""
    if path is None:
        return
    try:
        with replacing(path) as fresh:
            fresh.write_text(page(title, intro, sections), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
