"""All that the page shows, gathered from the files of checkpoints and from measurements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from calipers.checkpoint.auxiliary_files import NOTES
from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_module import StoredModule
from calipers.checkpoint.stored_weights import OriginalModel
from calipers.errors import counted, shortened
from calipers.linting import Finding
from calipers.measurements import MeasurementsInfo
from calipers.measurements.summary import Magnitudes
from calipers.numerics.formats import Format
from calipers.reporting.inputs import (
    REFERENCE,
    ChannelRanges,
    ChosenRange,
    Measured,
    MeasuredInput,
    distribution_of,
    has_one_range,
    histogram_of,
    range_of,
    ranges_by_observers,
)
from calipers.reporting.modules import (
    ModuleFacts,
    args_label,
    facts_of,
    judged,
    median_of,
    scheme_label,
)
from calipers.reporting.outside import Evaluated, Prediction, Sufficiency, number


class ObserverRanges(NamedTuple):
    """The ranges that observers would choose for an input in some format."""

    format: str
    ranges: tuple[ChosenRange, ...]


class InputDetail(NamedTuple):
    """What was seen of the input of some modules.

    :param by_format: one entry for each format in which a checkpoint has this input; int8 by
        tensor, as a reference, where none has
    """

    readers: tuple[str, ...]
    tokens: int
    exact: bool
    histogram: Magnitudes | None
    channels: ChannelRanges | None
    by_format: tuple[ObserverRanges, ...]


class WeightDetail(NamedTuple):
    """The weight of a module before it was quantized."""

    rows: int
    columns: int
    values: Magnitudes


class WeightLimits(NamedTuple):
    """The largest magnitude that codes reach, over all groups of a weight."""

    least: float
    median: float
    largest: float
    groups: int


def input_details(
    measured: Measured, checkpoints: Sequence[QuantizedCheckpoint]
) -> tuple[InputDetail, ...]:
    """Return what was seen of each distinct input."""
    details = []
    for seen in measured.inputs:
        formats = {}
        for name in seen.readers:
            for module in (each.quantized.get(name) for each in checkpoints):
                args = module.scheme.input_activations if module and module.scheme else None
                if args is not None and has_one_range(args):
                    formats[args.type, args.num_bits, args.symmetric] = args
        by_format = []
        if seen.values is not None and len(seen.values.values):
            known = list(seen.statistics.values())
            for args in formats.values() or (REFERENCE,):
                ranges = ranges_by_observers(known, seen.values, args, exact=seen.exact)
                by_format.append(ObserverRanges(args_label(args), ranges))
        histogram = None if seen.values is None else histogram_of(seen.values)
        known_of = seen.readers, seen.tokens, seen.exact, histogram, seen.channels
        details.append(InputDetail(*known_of, tuple(by_format)))
    return tuple(details)


def chosen_ranges(
    checkpoint: QuantizedCheckpoint, inputs: Mapping[str, MeasuredInput]
) -> dict[str, ChosenRange]:
    """Return the range of each static input, and what becomes of the values that were seen."""
    found = {}
    for name, module in checkpoint.quantized.items():
        seen, args = inputs.get(name), dict(module.sides).get("input")
        if args is None or not has_one_range(args) or seen is None or seen.values is None:
            continue
        scale, zero = module.read("input_scale"), module.read("input_zero_point")
        if scale is None or not scale.numel():
            continue
        zero = torch.zeros(1) if zero is None or not zero.numel() else zero
        found[name] = range_of("this checkpoint", seen.values, args, scale, zero, exact=seen.exact)
    return found


def weight_limits(module: StoredModule) -> WeightLimits | None:
    """Return how far codes reach in the groups of a weight."""
    weight = module.open_weight()
    if weight is None:
        return None
    largest = max(abs(end) for end in Format.of(weight.args).limits)
    limits = weight.scales().abs().flatten() * largest
    if not limits.numel() or not bool(torch.isfinite(limits).all()):
        return None
    ends = (float(limits.min()), float(limits.median()), float(limits.max()))
    return WeightLimits(*ends, limits.numel())


def weight_detail(source: OriginalModel, module: str) -> WeightDetail | None:
    """Return how the values of a weight are distributed; None if there is no such weight."""
    weight = source.weight(module)
    if weight is None or len(weight.shape) != 2 or not weight.size:
        return None
    return WeightDetail(*weight.shape, histogram_of(distribution_of(weight.map())))


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint, and what quantization made of its modules.

    :param schemes: how its modules are quantized, in words, and how many are
    :param bits: per weight of the modules that are quantized
    :param modules: in the order of layers
    :param chosen: module → the range of its static input
    :param limits: module → how far the codes of its weight reach
    :param missing: what is not known of it, and why
    """

    name: str
    schemes: Mapping[str, int]
    size: int
    bits: float | None
    modules: tuple[ModuleFacts, ...]
    chosen: Mapping[str, ChosenRange]
    limits: Mapping[str, WeightLimits]
    findings: tuple[Finding, ...] = ()
    missing: tuple[str, ...] = ()
    samples: int | None = None
    tokens: int | None = None

    @property
    def ranked(self) -> list[ModuleFacts]:
        """The modules whose output error is known, the worst first."""
        known = [row for row in self.modules if row.output_error is not None]
        return sorted(known, key=lambda row: -(row.output_error or 0.0))

    @property
    def median_error(self) -> float | None:
        """The output error of the median module."""
        return median_of(row.output_error for row in self.modules)


@dataclass(frozen=True)
class Content:
    """All that the page shows.

    :param weights: module → its weight before it was quantized
    :param predictions: what modules would lose under other schemes
    :param missing: what the page cannot show, and why
    """

    model: str
    architecture: str
    checkpoints: tuple[CheckpointFacts, ...]
    info: MeasurementsInfo | None = None
    source_size: int | None = None
    parameters: int | None = None
    inputs: tuple[InputDetail, ...] = ()
    weights: Mapping[str, WeightDetail] = field(default_factory=dict)
    evaluation: Evaluated | None = None
    predictions: tuple[Prediction, ...] = ()
    sufficiency: tuple[Sufficiency, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All modules, in the order of layers."""
        return list(dict.fromkeys(row.name for each in self.checkpoints for row in each.modules))


def gather(
    checkpoints: Sequence[QuantizedCheckpoint],
    measured: Measured,
    source: OriginalModel | None,
    *,
    evaluation: Evaluated | None = None,
    predictions: Sequence[Prediction] = (),
    sufficiency: Sequence[Sufficiency] = (),
    findings: Mapping[str, Sequence[Finding]] | None = None,
    missing: Sequence[str] = (),
) -> Content:
    """Gather all that the page shows; findings by the names of checkpoints."""
    for each in checkpoints:
        measured.check_fits(each)
    facts = tuple(
        _checkpoint(each, measured, source, (findings or {}).get(each.name, ()))
        for each in checkpoints
    )
    named = checkpoints[0].config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if measured.info is not None:
        architecture = measured.info.model
    names = dict.fromkeys(row.name for of_one in facts for row in of_one.modules)
    weights = {} if source is None else {name: weight_detail(source, name) for name in names}
    return Content(
        checkpoints[0].name if source is None else source.name,
        architecture,
        facts,
        measured.info,
        None if source is None else source.size,
        None if source is None else source.parameters,
        input_details(measured, checkpoints),
        {name: each for name, each in weights.items() if each is not None},
        evaluation,
        tuple(predictions),
        tuple(sufficiency),
        tuple(missing),
    )


def _checkpoint(
    checkpoint: QuantizedCheckpoint,
    measured: Measured,
    source: OriginalModel | None,
    findings: Iterable[Finding],
) -> CheckpointFacts:
    inputs, quantized = measured.by_module, checkpoint.quantized
    chosen = chosen_ranges(checkpoint, inputs)
    rows = judged(facts_of(checkpoint, measured, source), inputs, chosen)
    limits = {name: weight_limits(module) for name, module in quantized.items()}
    schemes = dict(Counter(scheme_label(module.scheme) for module in quantized.values()))
    states = checkpoint.settings.kv_cache_scheme
    if states is not None:
        scales = {"k_scale", "v_scale", "q_scale"}
        with_scales = [each for each in checkpoint.modules.values() if scales & set(each.tensors)]
        schemes[f"keys and values {args_label(states)}"] = len(with_scales)
    known = [each for each in quantized.values() if each.weight_shape]
    weights = sum(math.prod(each.weight_shape or ()) for each in known)
    samples, tokens = (number(checkpoint.notes.get(key)) for key in ("samples", "tokens"))
    return CheckpointFacts(
        checkpoint.name,
        schemes,
        checkpoint.size,
        sum(each.size for each in known) * 8 / weights if weights else None,
        rows,
        chosen,
        {name: each for name, each in limits.items() if each is not None},
        (*findings, *_own_findings(checkpoint, rows)),
        tuple(_missing(checkpoint, rows, source)),
        None if samples is None else int(samples),
        None if tokens is None else int(tokens),
    )


def _own_findings(
    checkpoint: QuantizedCheckpoint, rows: Sequence[ModuleFacts]
) -> Iterable[Finding]:
    """Say what the notes of the checkpoint and the errors of modules tell."""
    unseen = [row.name for row in rows if row.verdict == "unseen"]
    if unseen:
        problem = f"{counted(len(unseen), 'module')} saw no token: {shortened(unseen, 3)}"
        hint = "Measure with more data, or with all experts."
        yield Finding("warning", "coverage", unseen[0], problem, hint)
    notes = checkpoint.notes.get("notes")
    for name, note in notes.items() if isinstance(notes, Mapping) else ():
        yield Finding("warning", "recipe", str(name), str(note), "")
    for row in sorted(rows, key=lambda row: -(row.output_error or 0.0)):
        if row.verdict == "hurts":
            times = f", {row.times_median:.1f} times the median" if row.times_median else ""
            problem = f"its output loses {row.output_error:.1%}{times}"
            yield Finding("warning", "output error", row.name, problem, " ".join(row.reasons))


def _missing(
    checkpoint: QuantizedCheckpoint, rows: Sequence[ModuleFacts], source: OriginalModel | None
) -> Iterable[str]:
    """Say what is not known of a checkpoint, and what would help."""
    if not checkpoint.has_notes:
        yield (
            f"{NOTES} is not there: Calipers did not write this checkpoint, or the file was lost. "
            "Errors are worked out anew where the source is at hand"
        )
    quantized = [row for row in rows if row.name in checkpoint.quantized]
    anew = "" if source is None else " (its weights could not be compared with the source's)"
    if quantized and all(row.weight_error is None for row in quantized):
        yield f"Errors of weights are not known; give the source model to have them found{anew}"
    if quantized and all(row.costs.weight is None for row in quantized):
        yield (
            "Errors of outputs are not known: measure with --collect outputs before quantizing, or "
            f"give measurements and the source model{anew}"
        )
