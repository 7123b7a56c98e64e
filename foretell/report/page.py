"""A report as one HTML page: headings, sentences, tables, figures. Everything but a figure is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_CSS = """
:root { color-scheme: light dark; --ink: #1c2128; --quiet: #5b6572; --line: #d8dee4; --paper: #ffffff; --box: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e8ef; --quiet: #9aa5b1; --line: #39424d; --paper: #14181d; --box: #1d232a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 46rem; }
header p:first-of-type { font-size: 1.15rem; }
header p:not(:first-of-type), figcaption { color: var(--quiet); }
.wide { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: .25rem; }
th { font-weight: 600; }
td.mark { font-weight: 700; outline: 2px solid currentColor; outline-offset: -2px; }
figure { margin: 1rem 0; }
figure svg { display: block; max-width: 100%; height: auto; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .75rem 1rem; overflow-x: auto;
  font: 14px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media print {
  :root { color-scheme: light; --ink: #000000; --quiet: #444444; --line: #bbbbbb; --paper: #ffffff; --box: #ffffff; }
  body { max-width: none; padding: 0; font-size: 11pt; }
  section, table, figure, pre { break-inside: avoid; }
  pre { white-space: pre-wrap; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
""".strip()


@dataclass(frozen=True, slots=True)
class Table:
    """The first column is text, the others are figures. heat: how good each cell after the first column is, -1 (red)
    to 1 (green), 0 is not coloured; a list for each row. marks: (row, column) of cells that stand out."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    heat: Sequence[Sequence[float]] | None = None
    marks: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page, shown in this order. figure: SVG of `report.plots`; code: lines to be copied."""

    heading: str
    text: Sequence[str] = ()
    table: Table | None = None
    figure: str = ""
    code: str = ""


def page(title: str, intro: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole page. intro: what there is to know in a sentence, then how it was found out."""
    paragraphs = "\n".join(f"<p>{escape(line)}</p>" for line in intro)
    body = "\n".join(map(_section, sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_CSS}
</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{paragraphs}
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>", *(f"<p>{escape(line)}</p>" for line in section.text)]
    if section.table is not None:
        parts.append(f'<div class="wide">{_table(section.table)}</div>')
    if section.figure:
        parts.append(f"<figure>{section.figure}</figure>")
    if section.code:
        parts.append(f"<pre>{escape(section.code)}</pre>")
    return "\n".join(["<section>", *parts, "</section>"])


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in table.headers)
    rows = []
    for i, row in enumerate(table.rows):
        cells = [_cell(text, _heat(table, i, j), (i, j) in table.marks) for j, text in enumerate(row)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _heat(table: Table, row: int, column: int) -> float:
    return table.heat[row][column - 1] if table.heat is not None and column else 0.0


def _cell(text: str, heat: float, marked: bool) -> str:
    colour = "46, 160, 67" if heat > 0 else "218, 54, 51"
    strength = round(0.6 * min(1.0, abs(heat)), 3)
    style = f' style="background: rgba({colour}, {strength})"' if strength else ""
    mark = ' class="mark"' if marked else ""
    return f"<td{mark}{style}>{escape(text)}</td>"
