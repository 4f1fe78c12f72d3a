"""What the script of the page reads: the content as plain data, with few digits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from calipers.reporting.channels import ChannelRanges
from calipers.reporting.content import CheckpointFacts, Content
from calipers.reporting.details import InputDetail, WeightDetail
from calipers.reporting.histograms import LogHistogram
from calipers.reporting.modules import ModuleFacts
from calipers.reporting.names import Position, short_kinds
from calipers.reporting.outside import Evaluated, Prediction
from calipers.reporting.ranges import ChosenRange

_DIGITS = 4


def page_data(content: Content) -> dict[str, Any]:
    """Return all that the script shows, as plain data."""
    names = content.names
    positions = {name: Position.of(name) for name in names}
    kinds = short_kinds(each.kind for each in positions.values() if each.layer is not None)
    return {
        "modules": [_module(name, positions[name], kinds) for name in names],
        "kinds": list(kinds.values()),
        "checkpoints": [_checkpoint(each) for each in content.checkpoints],
        "inputs": [_input(each) for each in content.inputs],
        "weights": {name: _weight(each) for name, each in content.weights.items()},
        "predictions": _predictions(content.predictions),
        "layers": _layers(content.evaluation),
        "sufficiency": {each.tensor: [each.is_enough, each.reason] for each in content.sufficiency},
    }


def _module(name: str, position: Position, kinds: Mapping[str, str]) -> dict[str, Any]:
    if position.layer is None:
        return {"name": name, "layer": None, "kind": None}
    return {"name": name, "layer": position.layer, "kind": kinds[position.kind]}


def _checkpoint(facts: CheckpointFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "rows": {row.name: _row(row) for row in facts.modules},
        "chosen": {name: _range(each) for name, each in facts.chosen.items()},
        "limits": {
            name: [short(each.least), short(each.median), short(each.largest), each.groups]
            for name, each in facts.limits.items()
        },
    }


def _row(row: ModuleFacts) -> dict[str, Any]:
    return {
        "scheme": row.scheme,
        "bits": short(row.bits),
        "size": row.size,
        "weight": short(row.weight_error),
        "output": short(row.output_error),
        "byWeight": short(row.by_weight),
        "byInput": short(row.input_error),
        "tokens": row.tokens,
        "times": short(row.times_median),
        "verdict": row.verdict,
        "why": list(row.reasons),
    }


def _range(chosen: ChosenRange) -> list[Any]:
    ends = (chosen.low, chosen.high, chosen.step)
    return [chosen.observer, *map(short, ends), *map(short, chosen.shares)]


def _input(detail: InputDetail) -> dict[str, Any]:
    return {
        "readers": list(detail.readers),
        "tokens": detail.tokens,
        "exact": detail.exact,
        "histogram": _histogram(detail.histogram),
        "channels": _channels(detail.channels),
        "ranges": [[each.format, list(map(_range, each.ranges))] for each in detail.by_format],
    }


def _weight(detail: WeightDetail) -> dict[str, Any]:
    return {
        "shape": [detail.rows, detail.columns],
        "histogram": _histogram(detail.histogram),
        "largest": short(detail.largest),
        "rms": short(detail.rms),
    }


def _histogram(found: LogHistogram | None) -> list[Any] | None:
    return None if found is None else [found.first, list(found.counts), found.zeros]


def _channels(found: ChannelRanges | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "count": found.count,
        "width": found.width,
        "low": list(map(short, found.lows)),
        "high": list(map(short, found.highs)),
        "median": short(found.median),
        "outliers": found.outliers,
        "worst": [
            [each.index, short(each.low), short(each.high), short(each.times)]
            for each in found.worst
        ],
    }


def _predictions(found: Sequence[Prediction]) -> dict[str, dict[str, float | None]]:
    schemes: dict[str, dict[str, float | None]] = {}
    for each in found:
        schemes.setdefault(each.scheme, {})[each.module] = short(each.error)
    return schemes


def _layers(found: Evaluated | None) -> dict[str, list[list[Any]]]:
    return {
        model.name: [[each.layer, short(each.own), short(each.output)] for each in model.layers]
        for model in (found.models if found is not None else ())
        if model.layers
    }


def short(number: float | None) -> float | None:
    """Return a number with four significant digits; None where there is none.

    >>> short(0.123456), short(1234567.0), short(None), short(float("inf"))
    (0.1235, 1235000.0, None, None)
    """
    if number is None or not math.isfinite(number):
        return None
    return float(f"{number:.{_DIGITS}g}")
