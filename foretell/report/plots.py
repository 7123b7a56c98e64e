"""Plots as inline SVG: words stay words, ink takes the page's colour, and the same figures give the same bytes.

matplotlib draws them; it is an extra, and imported when the first plot is asked for.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

# Okabe and Ito's colours without yellow and black, the blue lighter: legible on light and dark paper
COLOURS = ("#1f83c9", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_INK = "#010203"  # replaced by the colour of the page's text
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "foretell",
    "font.size": 10,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],  # the first comes with matplotlib
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "grid.color": _INK,
}
WIDTH, HEIGHT = 7.5, 3.6  # inches


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a plot, or a series of bars; ys may hold NaN where there is nothing."""

    label: str
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Axes:
    """What is drawn: title for those who cannot see it, names of the axes, and a level that divides good from bad.
    zero: whether the y axis starts at 0. log: the x axis doubles at equal distances."""

    title: str
    x: str
    y: str
    level: float | None = None
    zero: bool = True
    log: bool = False


def lines(axes: Axes, xs: Sequence[float], curves: Sequence[Curve]) -> str:
    """Curves over xs as an SVG element. ValueError, in one sentence, if matplotlib is missing."""

    def draw(plot: Any) -> None:
        for i, curve in enumerate(curves):
            plot.plot(xs, curve.ys, marker="o", markersize=3.5, color=COLOURS[i % len(COLOURS)], label=curve.label)
        if axes.log:
            plot.set_xscale("log", base=2)
        plot.set_xticks(xs, [f"{x:g}" for x in xs])
        plot.minorticks_off()

    return _svg(axes, draw, len(curves))


def bars(axes: Axes, groups: Sequence[str], curves: Sequence[Curve]) -> str:
    """A bar of every curve in every group, as an SVG element. ValueError if matplotlib is missing."""

    def draw(plot: Any) -> None:
        width = 0.8 / len(curves)
        for i, curve in enumerate(curves):
            at = [group - 0.4 + (i + 0.5) * width for group in range(len(groups))]
            plot.bar(at, curve.ys, width * 0.95, color=COLOURS[i % len(COLOURS)], label=curve.label)
        plot.set_xticks(range(len(groups)), groups)
        plot.grid(axis="x", visible=False)

    return _svg(axes, draw, len(curves))


def _svg(axes: Axes, draw: Any, labels: int) -> str:
    try:
        library: Any = importlib.import_module("matplotlib")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError("an HTML report needs matplotlib: pip install 'foretell[report]'") from error
    with library.rc_context(_STYLE):
        figure = figures.Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        plot = figure.subplots()
        draw(plot)
        plot.set_xlabel(axes.x)
        plot.set_ylabel(axes.y)
        if axes.zero:
            plot.set_ylim(bottom=0)
        if axes.level is not None:
            plot.axhline(axes.level, color=_INK, linewidth=1, linestyle="--", alpha=0.6)
        if labels > 1:
            plot.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue(), axes.title)


def _inline(text: str, title: str) -> str:
    """The element alone, to stand in a page beside others."""
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)  # it would hold for the page
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # no name may occur twice in a page, and nothing refers to these
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL).replace(_INK, "currentColor").strip()
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}" stroke-linejoin="round"', 1)
