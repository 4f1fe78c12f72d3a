"""What quantization made of each module of a checkpoint, and which of them hurt, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, NamedTuple

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from calipers.checkpoint.quantized import QuantizedCheckpoint, recorded_costs
from calipers.checkpoint.stored_module import StoredModule
from calipers.checkpoint.stored_weights import OriginalModel
from calipers.errors import CalipersError
from calipers.judging.costs import COSTLY, ModuleCosts, module_costs
from calipers.linting.codes import stored_loss
from calipers.numerics.formats import Format
from calipers.numerics.layout import granularity_name
from calipers.reporting.inputs import ChosenRange, Measured, MeasuredInput
from calipers.reporting.outside import numbers_of
from calipers.topology.names import split_layer, without_numbers


def scheme_label(scheme: QuantizationScheme | None) -> str:
    """Return how a module is quantized, in a few words.

    >>> int8 = QuantizationArgs(num_bits=8)
    >>> scheme_label(QuantizationScheme(targets=["Linear"], weights=int8, input_activations=int8))
    'int8 by tensor, input int8 by tensor'
    """
    if scheme is None:
        return "not quantized"
    sides = {"": scheme.weights, "input ": scheme.input_activations}
    sides["output "] = scheme.output_activations
    return ", ".join(f"{side}{args_label(args)}" for side, args in sides.items() if args)


def args_label(args: QuantizationArgs) -> str:
    """Return a format and its granularity in a few words."""
    try:
        name = Format.of(args).name
    except CalipersError:  # a format of somebody else
        name = f"{args.type}{args.num_bits}"
    dynamic = " while it runs" if args.dynamic else ""
    return f"{name} by {granularity_name(args)}{dynamic}"


def layer_of(name: str) -> int | None:
    """Return the number of the decoder layer that a module is in; None outside of layers."""
    layer = split_layer(name)[0]
    return int(layer.rpartition(".")[2]) if layer else None


_ORDER = ("q", "k", "v", "qkv", "o", "out", "gate", "up", "gate_up", "down", "fc1", "fc2")


def short_kinds(names: Iterable[str]) -> dict[str, str]:
    """Return a short word for each kind of module in layers, in the order in which data meets them.

    >>> short_kinds(["layers.0.mlp.down_proj", "layers.0.attn.o_proj", "layers.0.attn.q_proj"])
    {'attn.q_proj': 'q', 'attn.o_proj': 'o', 'mlp.down_proj': 'down'}
    >>> list(short_kinds(["layers.0.attn.q_proj", "layers.0.cross.q_proj"]).values())
    ['attn.q_proj', 'cross.q_proj']
    """
    kinds = dict.fromkeys(kind_of(name) for name in names if layer_of(name) is not None)
    words = {kind: kind.rpartition(".")[2].removesuffix("_proj") for kind in kinds}
    counts = Counter(words.values())
    rank = {word: place for place, word in enumerate(_ORDER)}
    order = sorted(kinds, key=lambda kind: rank.get(words[kind], len(rank)))
    return {kind: words[kind] if counts[words[kind]] == 1 else kind for kind in order}


def kind_of(name: str) -> str:
    """Return what a module is called in each layer, such as mlp.experts.*.up_proj."""
    return without_numbers(split_layer(name)[1])


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
    :param weight_error: ‖Q(W) − W‖ / ‖W‖
    :param costs: the errors of its output that its weight and its static input cause
    :param tokens: how many were seen of its input
    :param times_median: how its output error compares with that of the median module
    :param reasons: why it hurts, one sentence each
    """

    name: str
    scheme: str
    bits: float | None = None
    size: int | None = None
    weight_error: float | None = None
    costs: ModuleCosts = field(default_factory=ModuleCosts)
    tokens: int | None = None
    times_median: float | None = None
    verdict: Verdict = "unknown"
    reasons: tuple[str, ...] = ()

    @property
    def output_error(self) -> float | None:
        """The error of its output, by weight and static input together."""
        return None if self.costs.weight is None else self.costs.output_error


def facts_of(
    checkpoint: QuantizedCheckpoint, measured: Measured, source: OriginalModel | None
) -> tuple[ModuleFacts, ...]:
    """Gather what is known of the modules that are quantized, or were measured."""
    inputs, quantized = measured.by_module, checkpoint.quantized
    names = dict.fromkeys([*quantized, *(name for name in inputs if name in checkpoint.modules)])
    coverage = checkpoint.notes.get("coverage")
    tokens = numbers_of(coverage.get("tokens") if isinstance(coverage, Mapping) else None)
    errors = numbers_of(checkpoint.notes.get("weight_errors"))
    costs: dict[str, ModuleCosts] = {}
    with suppress(CalipersError):  # which lint tells of
        costs = recorded_costs(checkpoint)
    rows = []
    layers = {name: layer_of(name) for name in names}
    # Layers in their order, and what stands outside of them last.
    for name in sorted(names, key=lambda name: (layers[name] is None, layers[name] or 0)):
        seen, module = inputs.get(name), checkpoint.modules[name]
        count = tokens.get(name, None if seen is None else seen.tokens)
        weights = math.prod(module.weight_shape or [0])
        is_quantized = name in quantized
        row = ModuleFacts(
            name,
            scheme_label(module.scheme if is_quantized else None),
            bits=module.size * 8 / weights if weights else None,
            size=module.size,
            weight_error=errors.get(name) if is_quantized else None,
            costs=costs.get(name, ModuleCosts()) if is_quantized else ModuleCosts(),
            tokens=None if count is None else int(count),
            verdict="unknown" if is_quantized else "float",
        )
        if source is not None and is_quantized:
            row = _with_errors(row, module, measured, source)
        rows.append(row)
    return tuple(rows)


def _with_errors(
    row: ModuleFacts, module: StoredModule, measured: Measured, source: OriginalModel
) -> ModuleFacts:
    """Work out the errors that the checkpoint does not tell."""
    is_known = row.weight_error is not None and row.costs.weight is not None
    stored = None if is_known else source.weight(row.name)
    if stored is None:
        return row
    original = stored.map()
    streams = measured.streams_of(row.name, original)
    loss = stored_loss(module, original, streams)
    if loss is None:
        return row
    return replace(
        row,
        weight_error=loss.error if row.weight_error is None else row.weight_error,
        costs=replace(row.costs, weight=module_costs(original, loss, streams, {}).weight),
    )


def judged(
    rows: Sequence[ModuleFacts],
    inputs: Mapping[str, MeasuredInput],
    chosen: Mapping[str, ChosenRange],
) -> tuple[ModuleFacts, ...]:
    """Say of each module whether it hurts, compared with the others, and why."""
    pairs = ((row.costs.weight, row.weight_error) for row in rows)
    median_output = median_of(row.output_error for row in rows)
    usual = _Usual(
        median_of(row.weight_error for row in rows),
        median_of(output / weight for output, weight in pairs if output and weight),
    )
    judgements = []
    for row in rows:
        error = row.output_error
        if row.verdict == "float":
            judgements.append(row)
        elif row.tokens == 0:
            reason = "No token reached it while the model was measured."
            judgements.append(replace(row, verdict="unseen", reasons=(reason,)))
        elif error is None:
            judgements.append(row)
        else:
            times = error / median_output if median_output else None
            verdict: Verdict = "fine"
            if error > COSTLY or (times or 0) > HURTS:
                verdict = "hurts"
            elif (times or 0) > WATCHED:
                verdict = "watch"
            why = _reasons(row, usual, inputs.get(row.name), chosen.get(row.name))
            reasons = () if verdict == "fine" else tuple(why)
            judgements.append(replace(row, times_median=times, verdict=verdict, reasons=reasons))
    return tuple(judgements)


class _Usual(NamedTuple):
    """What the weight of the median module loses, and how many times as much its output."""

    weight: float | None
    gain: float | None


def _reasons(
    row: ModuleFacts, usual: _Usual, seen: MeasuredInput | None, chosen: ChosenRange | None
) -> Iterable[str]:
    by_weight, by_input = row.costs.weight, row.costs.input_error
    if (by_input or 0) > (by_weight or 0):
        hidden = (row.costs.typical_input or 0) > (row.costs.input or 0)
        where = " of tokens without its few largest values" if hidden else ""
        yield (
            f"Its static input causes most of it: {format_share(by_input or 0)} of the "
            f"output{where}, the weights {format_share(by_weight or 0)}."
        )
        if chosen is not None:
            clipped, vanished, _ = chosen.shares
            reach = _amount(max(abs(chosen.low), abs(chosen.high)))
            if vanished > 0.01:
                yield (
                    f"One scale reaches ±{reach}, so that {format_share(vanished)} of all values "
                    "become zero."
                )
            if clipped > 0.0001:
                yield f"{format_share(clipped)} of all values lie beyond ±{reach} and are cut off."
    elif by_weight and row.weight_error:
        gain = by_weight / row.weight_error
        if usual.weight and row.weight_error > 1.15 * usual.weight:
            yield (
                f"Its weights lose {format_share(row.weight_error)}; those of the median module, "
                f"{format_share(usual.weight)}."
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


def _amount(value: float) -> str:
    """Write a number with three digits, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_share(share: float | None) -> str:
    """Return a share in percent.

    >>> format_share(0.1234), format_share(0.00001), format_share(None)
    ('12.3 %', '0.001 %', '–')
    """
    return "–" if share is None else f"{100 * share:.3g} %"


def median_of(errors: Iterable[float | None]) -> float | None:
    """Return the median of those that are known; None where none is."""
    known = [error for error in errors if error is not None]
    return median(known) if known else None
