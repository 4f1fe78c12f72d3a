"""What methods lose on several texts, with intervals, from the losses of each of their samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from tables import Row
from texts import CALIBRATION, JUDGED
from torch import Tensor

from calipers.evaluation.bootstrap import Bootstrap, Estimate, Sums

Losses = Mapping[str, Sequence[float]]
"""Text → −log q, summed over each sample."""

FLOAT = ""
"""The name of the float model among those of the methods."""

Figure = Callable[[Sums], Tensor]


def bootstrap(tokens: Mapping[str, Sequence[int]], losses: Mapping[str, Losses]) -> Bootstrap:
    """Draw the samples of all texts at once: every method is judged on the same draws.

    :param tokens: text → how many of each sample are predicted
    :param losses: method → what it loses, that of the float model among them
    """
    places = [(text, number) for text, counts in tokens.items() for number in range(len(counts))]

    def of_text(text: str, values: Sequence[float]) -> Tensor:
        own = [values[number] if text == each else 0.0 for each, number in places]
        return torch.tensor(own, dtype=torch.float64)

    sums = {f"tokens of {text}": of_text(text, counts) for text, counts in tokens.items()}
    base = losses[FLOAT]
    for method, own in losses.items():
        for text in tokens:
            lost = [q - p for q, p in zip(own[text], base[text], strict=True)]
            sums[f"{method} on {text}"] = of_text(text, lost)
    return Bootstrap(sums)


def nats(method: str, text: str) -> Figure:
    """Return the nats that a method loses for each token of a text."""
    return lambda sums: sums[f"{method} on {text}"] / sums[f"tokens of {text}"]


def mean(method: str, texts: Sequence[str]) -> Figure:
    """Return the mean over texts of the nats that a method loses."""
    figures = [nats(method, text) for text in texts]
    return lambda sums: torch.stack([figure(sums) for figure in figures]).mean(0)


def ratio(one: Figure, other: Figure) -> Figure:
    """Return one figure divided by another."""
    return lambda sums: one(sums) / other(sums)


def figures_of(found: Bootstrap, method: str, texts: Sequence[str], against: str | None) -> Row:
    """Return the figures of a method.

    ``judged`` is the mean over what is judged, ``gap`` is how many times as much is lost there as
    on the calibration, ``wide_gap`` the same of all texts but that, ``ratio`` is the mean beside
    that of another method.
    """
    others = [text for text in texts if text != CALIBRATION]
    wanted: dict[str, Figure] = {text: nats(method, text) for text in texts}
    wanted["judged"] = mean(method, JUDGED)
    wanted["gap"] = ratio(mean(method, JUDGED), nats(method, CALIBRATION))
    wanted["wide_gap"] = ratio(mean(method, others), nats(method, CALIBRATION))
    if against is not None:
        wanted["ratio"] = ratio(mean(method, JUDGED), mean(against, JUDGED))
    return {name: found.estimate(figure) for name, figure in wanted.items()}


def with_margin(estimate: Estimate) -> str:
    """Write a figure, and half of its interval."""
    return _with_margin(estimate, 4)


def with_rough_margin(estimate: Estimate) -> str:
    """Write a ratio, and half of its interval."""
    return _with_margin(estimate, 2)


def _with_margin(estimate: Estimate, digits: int) -> str:
    margin = (estimate.high - estimate.low) / 2  # not a number where a draw has none of a text
    known = f" ±{margin:.{digits}f}" if math.isfinite(margin) else ""
    return f"{estimate.value:.{digits}f}{known}"
