"""The best choice of one candidate for each group of modules, within a budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from calipers.checkpoint.writer import parse_size
from calipers.errors import ConfigurationError, Option
from calipers.judging.losses import error_of_decibels

Unit = Literal["bpw", "bytes", "nats", "dB"]

_EXAMPLES = (
    "Give bits per weight ('4.5bpw'), a size ('900MB'), what the loss may gain ('0.02nats'), or "
    "the error of outputs ('-25dB')."
)


@dataclass(frozen=True)
class Budget:
    """A limit: of the size of the modules that are advised on, or of what they lose.

    :param unit: bits per weight, bytes, nats per token that are added to the loss, or the mean
        relative error of outputs in dB

    >>> Budget.parse("4.5bpw"), Budget.parse("900 MB")
    (Budget(amount=4.5, unit='bpw'), Budget(amount=900000000.0, unit='bytes'))
    """

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str | float | Budget) -> Budget:
        """Read a budget; a bare number is one of bits per weight."""
        if isinstance(text, Budget):
            return text
        text = str(text).strip()
        subject = Option("budget", text)
        refused = ConfigurationError("is no budget", subject=subject, hint=_EXAMPLES)
        matched = re.fullmatch(r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*(bpw|nats|dB|)", text)
        if matched is None:
            try:
                return cls(float(parse_size(text)), "bytes")
            except ConfigurationError as error:
                raise refused from error
        amount, unit = float(matched[1]), matched[2] or "bpw"
        if unit != "dB" and amount <= 0:
            raise refused
        return cls(amount, unit)  # type: ignore[arg-type]  # one of those in the pattern

    @property
    def limits_size(self) -> bool:
        """Whether it is a limit of size, and not of error."""
        return self.unit in ("bpw", "bytes")

    def as_bytes(self, weights: int) -> float:
        """Return the limit of the size of so many weights."""
        return self.amount if self.unit == "bytes" else self.amount * weights / 8

    def as_harm(self) -> float:
        """Return the limit of what is lost: nats, or a mean of squared relative errors."""
        return self.amount if self.unit == "nats" else error_of_decibels(self.amount) ** 2

    def __str__(self) -> str:
        if self.unit == "bytes":
            return f"{self.amount:,.0f} bytes"
        return f"{self.amount:g} {self.unit}"


_SECONDS = 60.0  # after which the best choice found so far is taken, and its gap told


class Options(NamedTuple):
    """What each candidate costs each group: rows are groups, columns are candidates."""

    sizes: Sequence[Sequence[float]]
    harms: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Chosen:
    """One candidate for each group.

    :param gap: how much less, relatively, the best choice could lose that was not ruled out; 0 is
        proof that this one is the best, to a millionth of the largest single harm (or size), which
        is as far as the solver looks
    """

    columns: tuple[int, ...]
    size: float
    harm: float
    gap: float = 0.0


def choose(options: Options, *, size: float | None = None, harm: float | None = None) -> Chosen:
    """Return the choice that loses least within a size, or is smallest within a loss.

    A knapsack of which one thing of each kind is taken, solved as an integer program.
    """
    import numpy as np
    from scipy.optimize import (  # type: ignore[import-untyped]
        Bounds,
        LinearConstraint,
        milp,
    )
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    wanted, limited = options.harms, options.sizes
    limit = size
    if limit is None:
        assert harm is not None
        wanted, limited, limit = options.sizes, options.harms, harm
    least = sum(min(row) for row in limited)
    if least > limit:
        raise UnreachableError(least)
    goal, held = np.ravel(wanted).astype(float), np.ravel(limited).astype(float)
    groups, count = len(options.sizes), len(options.sizes[0])
    rows = np.repeat(np.arange(groups), count)
    ones = csr_array((np.ones(len(goal)), (rows, np.arange(len(goal)))))
    solved: Any = milp(
        goal / (np.abs(goal).max() or 1.0),
        constraints=[
            LinearConstraint(ones, 1, 1),
            LinearConstraint(held[None] / limit, -np.inf, 1),
        ],
        integrality=np.ones(len(goal)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": _SECONDS},
    )
    if solved.x is None:
        raise ConfigurationError(
            f"No choice of schemes was found: {solved.message}", hint="Give a larger budget."
        )
    columns = tuple(int(each) for each in solved.x.reshape(groups, count).argmax(1))
    return chosen(options, columns, float(solved.mip_gap or 0.0))


class UnreachableError(ConfigurationError):
    """A limit that no choice stays within; ``least`` is the nearest that one does."""

    def __init__(self, least: float) -> None:
        super().__init__("No choice of schemes stays within the budget")
        self.least = least


def front(options: Options) -> list[Chosen]:
    """Return the choices that no other beats in both size and harm, from the smallest on.

    Those of the lower convex hull: each step takes the group that gains most for its bytes.

    >>> [(each.size, each.harm) for each in front(Options([[1, 4], [1, 4]], [[9, 1], [5, 2]]))]
    [(2, 14), (5, 6), (8, 3)]
    """
    hulls = [_hull(sizes, harms) for sizes, harms in zip(*options, strict=True)]
    columns = [hull[0] for hull in hulls]
    steps = []
    for group, hull in enumerate(hulls):
        for number, (one, other) in enumerate(pairwise(hull)):
            more = options.sizes[group][other] - options.sizes[group][one]
            less = options.harms[group][one] - options.harms[group][other]
            steps.append((-less / more, number, group, other))
    found = [chosen(options, columns)]
    for _, _, group, column in sorted(steps):
        columns[group] = column
        found.append(chosen(options, columns))
    return found


def _hull(sizes: Sequence[float], harms: Sequence[float]) -> list[int]:
    """Return the columns on the lower convex hull, from the smallest on."""
    hull: list[int] = []
    for column in sorted(range(len(sizes)), key=lambda each: (sizes[each], harms[each])):
        if hull and harms[column] >= harms[hull[-1]]:
            continue
        while len(hull) > 1:
            one, other = hull[-2:]
            across = (harms[other] - harms[one]) * (sizes[column] - sizes[one])
            if not across >= (harms[column] - harms[one]) * (sizes[other] - sizes[one]):
                break  # the one in the middle is below the line between the others
            hull.pop()
        hull.append(column)
    return hull


def chosen(options: Options, columns: Sequence[int], gap: float = 0.0) -> Chosen:
    """Add up what a choice of one candidate for each group costs."""
    size = sum(row[column] for row, column in zip(options.sizes, columns, strict=True))
    harm = sum(row[column] for row, column in zip(options.harms, columns, strict=True))
    return Chosen(tuple(columns), size, harm, gap)
