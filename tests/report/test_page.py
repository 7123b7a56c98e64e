"""A report page: whole, escaped, in need of nothing else, and the same bytes for the same figures."""

from __future__ import annotations

import importlib
import math
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from foretell.report.page import Section, Table, page
from foretell.report.plots import Axes, Curve, bars, lines

AXES = Axes('speed-up & "more"', "draft length", "speed-up <times>", level=1.0)
CURVES = [Curve("batch 1", [1.0, 1.5, math.nan]), Curve("batch <8>", [0.9, 0.8, 0.7])]
CURVES_OF_TWO = [Curve("plain", [1, 2]), Curve("drafted", [2, 3])]
ODD = "<script>alert(1)</script> & \"quoted\" 'text'"


class Tags(HTMLParser):
    """Every tag that was opened, with its attributes; complains of one that is closed out of turn."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def whole_page() -> str:
    table = Table([ODD, "1", "2"], [[ODD, "3", "4"], ["b", "5", "6"]], heat=[[0.5, -1], [0, 9]], marks=[(0, 1)])
    figure = lines(AXES, [1, 2, 4], CURVES)
    sections = [Section(ODD, [ODD], table, figure, ODD), Section("bars", figure=bars(AXES, ["a", "b"], CURVES_OF_TWO))]
    return page(ODD, [ODD, "second"], sections)


def test_a_page_is_well_formed_and_needs_nothing_else() -> None:
    parsed = Tags(whole_page())
    tags = [tag for tag, _ in parsed.opened]
    assert tags.count("html") == tags.count("h1") == tags.count("style") == 1 and tags.count("svg") == 2
    assert not {"script", "link", "img", "iframe"} & set(tags)
    for _, attributes in parsed.opened:
        for name, value in attributes.items():
            assert name not in ("src", "href") and not name.startswith("on")
            assert name != "xlink:href" or (value or "").startswith("#"), value
    assert "@import" not in whole_page() and not re.search(r"url\((?!#)", whole_page())


def test_whatever_is_written_is_shown_as_it_is() -> None:
    text = whole_page()
    assert "<script" not in text
    assert Tags(text).text.count(ODD) == 8  # title twice, intro, heading, text, table's head and body, code
    assert Tags(text).text.count("batch <8>") == 1


def test_heat_and_marks_are_at_their_cells() -> None:
    cells = [attributes for tag, attributes in Tags(whole_page()).opened if tag == "td"]
    green, red = "background: rgba(46, 160, 67, {})", "background: rgba(218, 54, 51, {})"
    assert [cell.get("style") for cell in cells] == [
        None,
        green.format(0.3),
        red.format(0.6),
        None,
        None,
        green.format(0.6),
    ]
    assert [cell.get("class") for cell in cells] == [None, "mark", None, None, None, None]


def test_no_name_occurs_twice_with_another_meaning() -> None:
    """Figures of one page share its names: the same name must stand for the same thing."""
    definitions: dict[str, str] = {}
    for name, body in re.findall(r'<(?:path|clipPath) id="([^"]+)"(.*?)/>', whole_page(), flags=re.DOTALL):
        assert definitions.setdefault(name, body) == body
    assert definitions


@pytest.mark.parametrize("log", [False, True])
def test_a_plot_is_an_svg_element_of_the_pages_ink(log: bool) -> None:
    axes = Axes(AXES.title, AXES.x, AXES.y, log=log)
    text = lines(axes, [1, 2, 4], CURVES)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg") and root.attrib["aria-label"] == AXES.title and root.attrib["viewBox"]
    words = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]
    assert {AXES.x, AXES.y, "batch 1", "batch <8>", "1", "2", "4"} <= set(words)
    assert "currentColor" in text and "#010203" not in text and "<style" not in text


def test_the_same_figures_are_the_same_bytes() -> None:
    assert lines(AXES, [1, 2, 4], CURVES) == lines(AXES, [1, 2, 4], CURVES)
    assert bars(AXES, ["a", "b"], CURVES_OF_TWO) != bars(AXES, ["a", "c"], CURVES_OF_TWO)


def test_a_single_curve_needs_no_legend() -> None:
    assert "only" not in lines(AXES, [1, 2], [Curve("only", [1, 2])])


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"pip install 'foretell\[report\]'"):
        lines(AXES, [1, 2], CURVES)
