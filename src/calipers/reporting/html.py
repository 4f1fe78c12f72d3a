"""Tables and small plots for notebooks; nothing in them is taken for markup.

Plots are SVG in the colour of the text, so that they are as dark or light as the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any

_MOST_ROWS = 60
_HOT = "#e4572e"
"""Is read on light and on dark pages."""
_CELL = (64, 20)
_LETTER = 7.2
"""How wide a letter of 12 pixels is, about."""


def html_table(
    rows: Sequence[Mapping[str, object]],
    caption: str = "",
    *,
    most: int = _MOST_ROWS,
    plots: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return rows of the same columns as a table of HTML; nothing in them is taken for markup.

    :param most: how many rows are shown; the rest is counted
    :param plots: columns of plots, which are markup: one for each row
    """
    plots = plots or {}
    columns = [*rows[0], *plots] if rows else []
    lines = [
        _row("td", row.values(), [plot[number] for plot in plots.values()])
        for number, row in enumerate(islice(rows, most))
    ]
    if len(rows) > most:
        lines.append(f'<tr><td colspan="{len(columns)}">… and {len(rows) - most:,} more</td></tr>')
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = f"<thead>{_row('th', columns)}</thead>" if columns else ""
    return f"<table>{title}{head}<tbody>{''.join(lines)}</tbody></table>"


def facts_table(facts: Mapping[str, object], caption: str = "") -> str:
    """Return names and what there is to say about each as a table of HTML."""
    lines = (
        f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>"
        for name, fact in facts.items()
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<tbody>{''.join(lines)}</tbody></table>"


def _row(kind: str, cells: Iterable[object], plots: Iterable[str] = ()) -> str:
    inside = "".join(f"<{kind}>{escape(str(cell))}</{kind}>" for cell in cells)
    drawn = "".join(f"<{kind}>{plot}</{kind}>" for plot in plots)
    return f"<tr>{inside}{drawn}</tr>"


# Plots


def svg_bars(numbers: Mapping[str, float], caption: str = "", *, form: str = ",.4g") -> str:
    """Return numbers as bars that lie beneath each other, each with its name and value."""
    if not numbers:
        return ""
    left = _LETTER * max(map(len, numbers)) + 8
    most = max((abs(number) for number in numbers.values()), default=0.0) or 1.0
    parts = []
    for place, (name, number) in enumerate(numbers.items()):
        top, width = place * 20, 240 * abs(number) / most
        parts.append(_text(left - 6, top + 14, name, anchor="end"))
        parts.append(_rect(left, top + 3, width, 14, opacity=0.55))
        parts.append(_text(left + width + 5, top + 14, f"{number:{form}}"))
    return _svg(left + 240 + 90, 20 * len(numbers), "".join(parts), caption)


def svg_histogram(histogram: Mapping[str, Any] | None) -> str:
    """Return how often magnitudes occurred as small columns, one for each power of two.

    :param histogram: ``counts``, and the ``exponent`` of the first of them; None: an empty plot
    """
    if not histogram or not histogram["counts"]:
        return ""
    counts, first = histogram["counts"], histogram["exponent"]
    most = max(counts)
    parts = []
    for place, count in enumerate(counts):
        height = 2 + 22 * count / most if count else 0
        title = f"2^{first + place} to 2^{first + place + 1}: {count:,}"
        parts.append(_rect(place * 5, 24 - height, 4, height, opacity=0.7, title=title))
    return _svg(5 * len(counts), 24, "".join(parts))


def svg_heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    caption: str = "",
    *,
    form: str = ".1f",
    ends: tuple[float, float],
) -> str:
    """Return numbers in cells that are the stronger in colour, the further up a scale they are.

    :param ends: where the scale begins and ends; logarithmic where both are positive
    """
    if not rows or not columns:
        return ""
    wide, high = max(_CELL[0], _LETTER * max(map(len, columns)) + 8), _CELL[1]
    left = _LETTER * max(map(len, rows)) + 10
    parts = [_text(left + (n + 0.5) * wide, 14, c, anchor="middle") for n, c in enumerate(columns)]
    for line, (name, row) in enumerate(zip(rows, values, strict=True), 1):
        parts.append(_text(left - 6, line * high + 14, name, anchor="end"))
        for place, value in enumerate(row):
            if value is not None:
                x, share = left + place * wide, share_of_scale(value, ends)
                parts.append(_rect(x, line * high, wide - 1, high - 1, _HOT, 0.85 * share))
                parts.append(_text(x + wide / 2, line * high + 14, f"{value:{form}}", "middle"))
    return _svg(left + len(columns) * wide, (len(rows) + 1) * high, "".join(parts), caption)


def share_of_scale(value: float, ends: tuple[float, float]) -> float:
    """Return how far up a scale a number is, from 0 to 1.

    >>> share_of_scale(400, (4, 400)), share_of_scale(-30, (-60, 0)), share_of_scale(1, (4, 400))
    (1.0, 0.5, 0.0)
    """
    low, high = ends
    if low > 0:
        low, high, value = math.log(low), math.log(high), math.log(value) if value > 0 else low
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _svg(width: float, height: float, inside: str, caption: str = "") -> str:
    title = ""
    if caption:
        title, height = _text(0, 13, caption, weight="bold"), height + 22
        inside = f'<g transform="translate(0 22)">{inside}</g>'
        width = max(width, _LETTER * 1.1 * len(caption))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" fill="currentColor" font-family="monospace" font-size="12">'
        f"{title}{inside}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"


def _rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str = "currentColor",
    opacity: float = 1.0,
    title: str = "",
) -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}" fill-opacity="{opacity:.2f}">{inside}</rect>'
    )
