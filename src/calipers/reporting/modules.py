"""What quantization made of each module of a checkpoint, and which of them hurt, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.judging.costs import COSTLY, ModuleCosts
from calipers.judging.outputs import module_costs
from calipers.reporting.labels import scheme_label
from calipers.reporting.measured import Measured, MeasuredInput
from calipers.reporting.names import Position
from calipers.reporting.outside import number, numbers_of
from calipers.reporting.ranges import ChosenRange
from calipers.reporting.source import SourceModel, loss_of

Verdict = Literal["hurts", "watch", "fine", "unseen", "unknown", "float"]

HURTS = 2.0
"""A module hurts whose output loses that many times as much as that of the median module."""
WATCHED = 1.3
"""One is worth a look that loses that many times as much."""


@dataclass(frozen=True)
class ModuleFacts:
    """A module of a checkpoint. Errors are relative, ‖error‖ / ‖whole‖; None: not known.

    :param scheme: how it is quantized, in words
    :param bits: per weight, with scales
    :param size: in bytes
    :param weight_error: ‖Q(W) − W‖ / ‖W‖
    :param by_weight: the error of its output that the weight causes
    :param by_input: the error of its output that the static input causes
    :param typical_input: the same for tokens without any of the few largest values of the input
    :param tokens: how many were seen of its input
    :param times_median: how its output error compares with that of the median module
    :param reasons: why it hurts, one sentence each
    """

    name: str
    scheme: str
    bits: float | None = None
    size: int | None = None
    weight_error: float | None = None
    by_weight: float | None = None
    by_input: float | None = None
    typical_input: float | None = None
    tokens: int | None = None
    times_median: float | None = None
    verdict: Verdict = "unknown"
    reasons: tuple[str, ...] = ()

    @property
    def input_error(self) -> float | None:
        """The error of its output that the static input causes, over all tokens or typical ones."""
        return self._costs.input_error

    @property
    def output_error(self) -> float | None:
        """The error of its output, by weight and static input together."""
        return None if self.by_weight is None else self._costs.output_error

    @property
    def _costs(self) -> ModuleCosts:
        return ModuleCosts(self.by_weight, self.by_input, self.typical_input)


def facts_of(
    folder: QuantizedCheckpoint, measured: Measured, source: SourceModel | None
) -> tuple[ModuleFacts, ...]:
    """Gather what is known of the modules that are quantized, or were measured."""
    inputs = measured.by_module
    measured_too = (name for name in inputs if name in folder.modules)
    names = dict.fromkeys([*folder.quantized, *measured_too])
    tokens = numbers_of(_object(folder.notes.get("coverage")).get("tokens"))
    found = []
    layers = {name: Position.of(name).layer for name in names}
    # Layers in their order, and what stands outside of them last.
    for name in sorted(names, key=lambda name: (layers[name] is None, layers[name] or 0)):
        seen = inputs.get(name)
        count = tokens.get(name, None if seen is None else seen.tokens)
        module = folder.modules[name]
        weights = math.prod(module.weight_shape or [0])
        row = ModuleFacts(
            name,
            scheme_label(module.scheme if name in folder.quantized else None),
            bits=module.size * 8 / weights if weights else None,
            size=module.size,
            tokens=None if count is None else int(count),
        )
        found.append(_with_errors(row, folder, measured, source))
    return tuple(found)


def _with_errors(
    row: ModuleFacts,
    folder: QuantizedCheckpoint,
    measured: Measured,
    source: SourceModel | None,
) -> ModuleFacts:
    """Take errors from the notes of the checkpoint, or work them out."""
    if row.name not in folder.quantized:
        return replace(row, verdict="float")
    errors = numbers_of(folder.notes.get("weight_errors"))
    costs = _object(_object(folder.notes.get("costs")).get(row.name))
    row = replace(
        row,
        weight_error=errors.get(row.name),
        by_weight=number(costs.get("weight")),
        by_input=number(costs.get("input")),
        typical_input=number(costs.get("typical_input")),
    )
    if source is None or (row.weight_error is not None and row.by_weight is not None):
        return row
    original = source.weight(row.name)
    if original is None:
        return row
    streams = measured.streams_of(row.name, original)
    loss = loss_of(folder.modules[row.name], original, streams)
    if loss is None:
        return row
    return replace(
        row,
        weight_error=loss.error if row.weight_error is None else row.weight_error,
        by_weight=module_costs(original, loss, streams, {}).weight,
    )


def judged(
    rows: Sequence[ModuleFacts],
    inputs: Mapping[str, MeasuredInput],
    chosen: Mapping[str, ChosenRange],
) -> tuple[ModuleFacts, ...]:
    """Say of each module whether it hurts, compared with the others, and why."""
    usual = _Usual.of(rows)
    return tuple(_judged(row, usual, inputs.get(row.name), chosen.get(row.name)) for row in rows)


@dataclass(frozen=True)
class _Usual:
    """What the median module of a checkpoint loses: its output, its weight, and their ratio."""

    output: float | None
    weight: float | None
    gain: float | None

    @classmethod
    def of(cls, rows: Sequence[ModuleFacts]) -> _Usual:
        gains = (
            row.by_weight / row.weight_error for row in rows if row.by_weight and row.weight_error
        )
        return cls(
            _median(row.output_error for row in rows),
            _median(row.weight_error for row in rows),
            _median(gains),
        )


def _judged(
    row: ModuleFacts, usual: _Usual, seen: MeasuredInput | None, chosen: ChosenRange | None
) -> ModuleFacts:
    if row.verdict == "float":
        return row
    if row.tokens == 0:
        reason = "No token reached it while the model was measured."
        return replace(row, verdict="unseen", reasons=(reason,))
    error = row.output_error
    if error is None:
        return row
    times = error / usual.output if usual.output else None
    verdict: Verdict = "fine"
    if error > COSTLY or (times or 0) > HURTS:
        verdict = "hurts"
    elif (times or 0) > WATCHED:
        verdict = "watch"
    reasons = () if verdict == "fine" else tuple(_reasons(row, usual, seen, chosen))
    return replace(row, times_median=times, verdict=verdict, reasons=reasons)


def _reasons(
    row: ModuleFacts, usual: _Usual, seen: MeasuredInput | None, chosen: ChosenRange | None
) -> Iterable[str]:
    if (row.input_error or 0) > (row.by_weight or 0):
        yield from _about_input(row, chosen)
    elif row.by_weight and row.weight_error:
        gain = row.by_weight / row.weight_error
        if usual.weight and row.weight_error > 1.15 * usual.weight:
            yield (
                f"Its weights lose {_percent(row.weight_error)}; those of the median module, "
                f"{_percent(usual.weight)}."
            )
        if usual.gain and gain > 1.15 * usual.gain:
            yield (
                f"Its output is small for what goes in, so that errors count more: it loses "
                f"{gain:.2g} times what the weights lose, elsewhere {usual.gain:.2g} times."
            )
    if seen is not None and seen.channels is not None and seen.channels.outliers:
        worst, count = seen.channels.worst[0], seen.channels.outliers
        yield (
            f"{count:,} of {seen.channels.count:,} input channels {'is' if count == 1 else 'are'} "
            f"more than 8 times as large as the median channel; channel {worst.index:,} is "
            f"{_amount(worst.times)} times as large."
        )


def _about_input(row: ModuleFacts, chosen: ChosenRange | None) -> Iterable[str]:
    hidden = (row.typical_input or 0) > (row.by_input or 0)
    where = " of tokens without its few largest values" if hidden else ""
    yield (
        f"Its static input causes most of it: {_percent(row.input_error or 0)} of the "
        f"output{where}, the weights {_percent(row.by_weight or 0)}."
    )
    if chosen is None:
        return
    clipped, vanished, _ = chosen.shares
    reach = max(abs(chosen.low), abs(chosen.high))
    if vanished > 0.01:
        yield (
            f"One scale reaches ±{_amount(reach)}, so that {_percent(vanished)} of all values "
            "become zero."
        )
    if clipped > 0.0001:
        yield f"{_percent(clipped)} of all values lie beyond ±{_amount(reach)} and are cut off."


def _amount(value: float) -> str:
    """Write a number with three digits, and all of those before the point.

    >>> _amount(3792.4), _amount(0.01234)
    ('3,792', '0.0123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _median(errors: Iterable[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return median(known) if known else None


def _object(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}
