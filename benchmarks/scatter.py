"""A plot as SVG: what is lost against the time it takes, a panel for each scheme."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 460, 320  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 60, 120, 30, 40
COLUMNS = 2


class Point(NamedTuple):
    """A method: its name, its group, which has a colour, and where it is."""

    name: str
    group: str
    x: float
    y: float


class Axis(NamedTuple):
    """From values to places; logarithmic."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round numbers, as many as fit."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
        return [value for value in found if self.low <= value <= self.high]


COLOURS = ("#1b6ca8", "#c8553d", "#4f772d", "#7b2d8b")


def svg(panels: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    """Draw all panels; points that are not positive are left out."""
    groups = sorted({point.group for points in panels.values() for point in points})
    colours = {group: COLOURS[i % len(COLOURS)] for i, group in enumerate(groups)}
    parts = []
    for number, (title, points) in enumerate(panels.items()):
        row, column = divmod(number, COLUMNS)
        shown = [point for point in points if point.x > 0 and point.y > 0]
        inner = panel(title, shown, colours, (x_label, y_label)) if shown else ""
        parts.append(f'<g transform="translate({column * WIDTH} {row * HEIGHT})">{inner}</g>')
    width, height = COLUMNS * WIDTH, math.ceil(len(panels) / COLUMNS) * HEIGHT
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{inside}\n</svg>\n'
    )


def panel(
    title: str, points: Sequence[Point], colours: Mapping[str, str], labels: tuple[str, str]
) -> str:
    """Draw one panel."""
    across = axis([point.x for point in points], LEFT, WIDTH - RIGHT)
    upward = axis([point.y for point in points], HEIGHT - BOTTOM, TOP)
    bottom, middle = HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2
    parts = [
        text(middle, 18, title, "middle", 'font-weight="bold"'),
        text(middle, HEIGHT - 8, labels[0], "middle"),
        text(14, HEIGHT / 2, labels[1], "middle", f'transform="rotate(-90 14 {HEIGHT / 2})"'),
        f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="#444"/>',
    ]
    for value in across.ticks():
        parts.append(f'<path d="M{across(value):.1f} {bottom}v4" stroke="#444"/>')
        parts.append(text(across(value), bottom + 16, f"{value:g}", "middle"))
    for value in upward.ticks():
        parts.append(f'<path d="M{LEFT - 4} {upward(value):.1f}h4" stroke="#444"/>')
        parts.append(text(LEFT - 7, upward(value) + 4, f"{value:g}", "end"))
    beneath = -math.inf
    # Names of points that are close to each other stand below one another.
    for point in sorted(points, key=lambda each: upward(each.y)):
        x, y = across(point.x), upward(point.y)
        beneath = max(y + 4, beneath + 12)
        colour = colours[point.group]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(text(x + 8, beneath, point.name, "start", f'fill="{colour}"'))
    return "\n".join(parts)


def axis(values: Sequence[float], start: float, stop: float) -> Axis:
    """Return an axis on which all values have a place, with some room around them."""
    return Axis(min(values) / 1.25, max(values) * 1.25, start, stop)


def text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    """Write words at a place."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place} {more}>{escape(words)}</text>"
