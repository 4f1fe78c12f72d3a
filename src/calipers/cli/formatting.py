"""How numbers and names are put to people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calipers.evaluation import Difference

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def format_size(size: float) -> str:
    """Return a size with a unit.

    >>> format_size(12), format_size(657_664), format_size(16.06e9)
    ('12 bytes', '658 kB', '16.1 GB')
    """
    power = 0
    while abs(size) >= 999.5 and power < len(_UNITS) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {_UNITS[power]}"


def format_optional_size(size: int | None) -> str:
    """Return a size with a unit, or nothing where it is not known."""
    return "" if size is None else format_size(size)


def format_difference(found: Difference) -> str:
    """Return a difference with its interval; that it is noise is said where that does not.

    >>> from calipers.evaluation import Difference
    >>> format_difference(Difference(0.25, 0.2, 0.3, noise=0.5))
    '+0.2500 [+0.2000, +0.3000] noise'
    """
    hidden = not found.beyond_noise and not found.holds(0)
    return found.text("+.4f") + (" noise" if hidden else "")


def pattern_of(name: str) -> str:
    """Return the name of a module without the numbers in it.

    >>> pattern_of("model.layers.12.mlp.experts.3.up_proj")
    'model.layers.*.mlp.experts.*.up_proj'
    """
    return _NUMBER.sub("*", name)


def common_name(names: Sequence[str]) -> str:
    """Return one name for modules whose names differ in their numbers alone.

    >>> common_name(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "layers.5.mlp"])
    'layers.{0..2,5}.mlp'
    """
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    numbers = map(_ranges, columns)
    return _NUMBER.sub(lambda _: next(numbers), names[0])


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    if runs == [runs[0]] and len(runs[0]) == 1:
        return str(runs[0][0])
    return "{" + ",".join("..".join(map(str, run)) for run in runs) + "}"
