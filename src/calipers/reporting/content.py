"""All that the page shows, gathered from the files of checkpoints and from measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from calipers.errors import counted, shortened
from calipers.measurements import MeasurementsInfo
from calipers.reporting.checkpoints import (
    CheckpointFolder,
    args_label,
    attention_modules,
    scheme_label,
)
from calipers.reporting.details import (
    InputDetail,
    WeightDetail,
    WeightLimits,
    chosen_ranges,
    input_details,
    weight_detail,
    weight_limits,
)
from calipers.reporting.measured import Measured
from calipers.reporting.modules import ModuleFacts, facts_of, judged
from calipers.reporting.outside import Evaluated, Finding, Prediction, Sufficiency, numbers_of
from calipers.reporting.ranges import ChosenRange
from calipers.reporting.source import SourceModel


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
        errors = [row.output_error for row in self.modules if row.output_error is not None]
        return median(errors) if errors else None


@dataclass(frozen=True)
class Content:
    """All that the page shows.

    :param inputs: what was seen of each distinct input
    :param weights: module → its weight before it was quantized
    :param predictions: what modules would lose under other schemes
    :param sufficiency: whether enough data was seen of tensors
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
    folders: Sequence[CheckpointFolder],
    measured: Measured,
    source: SourceModel | None,
    *,
    evaluation: Evaluated | None = None,
    predictions: Sequence[Prediction] = (),
    sufficiency: Sequence[Sufficiency] = (),
    findings: Mapping[str, Sequence[Finding]] | None = None,
    missing: Sequence[str] = (),
) -> Content:
    """Gather all that the page shows.

    :param findings: checkpoint → what was found wrong with it
    :param missing: what is not at hand, and why
    """
    for folder in folders:
        measured.check_fits(folder)
    checkpoints = tuple(
        _checkpoint(folder, measured, source, (findings or {}).get(folder.name, ()))
        for folder in folders
    )
    names = dict.fromkeys(row.name for each in checkpoints for row in each.modules)
    weights = {} if source is None else {name: weight_detail(source, name) for name in names}
    return Content(
        folders[0].name if source is None else source.name,
        _architecture(folders[0], measured),
        checkpoints,
        measured.info,
        None if source is None else source.size,
        None if source is None else source.parameters,
        input_details(measured, folders),
        {name: each for name, each in weights.items() if each is not None},
        evaluation,
        tuple(predictions),
        tuple(sufficiency),
        tuple(missing),
    )


def _architecture(folder: CheckpointFolder, measured: Measured) -> str:
    if measured.info is not None:
        return measured.info.model
    named = folder.config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _checkpoint(
    folder: CheckpointFolder,
    measured: Measured,
    source: SourceModel | None,
    findings: Iterable[Finding],
) -> CheckpointFacts:
    inputs = measured.by_module
    chosen = chosen_ranges(folder, inputs)
    rows = judged(facts_of(folder, measured, source), inputs, chosen)
    limits = {name: weight_limits(folder, name) for name in folder.schemes}
    amounts = numbers_of({key: folder.notes.get(key) for key in ("samples", "tokens")})
    return CheckpointFacts(
        folder.name,
        _schemes(folder),
        folder.size,
        _bits(folder),
        rows,
        chosen,
        {name: each for name, each in limits.items() if each is not None},
        (*findings, *_own_findings(folder, rows)),
        (*folder.missing, *_missing(folder, rows, source)),
        *(int(amounts[key]) if key in amounts else None for key in ("samples", "tokens")),
    )


def _schemes(folder: CheckpointFolder) -> dict[str, int]:
    found: dict[str, int] = {}
    for scheme in folder.schemes.values():
        label = scheme_label(scheme)
        found[label] = found.get(label, 0) + 1
    if folder.kv_cache is not None:
        label = f"keys and values {args_label(folder.kv_cache)}"
        found[label] = sum(1 for _ in attention_modules(folder))
    return found


def _bits(folder: CheckpointFolder) -> float | None:
    known = [(folder.size_of(name), folder.shape_of(name)) for name in folder.schemes]
    pairs = [(size, math.prod(shape)) for size, shape in known if size is not None and shape]
    total = sum(count for _, count in pairs)
    return sum(size for size, _ in pairs) * 8 / total if total else None


def _own_findings(folder: CheckpointFolder, rows: Sequence[ModuleFacts]) -> Iterable[Finding]:
    """Say what the notes of the checkpoint and the errors of modules tell."""
    unseen = [row.name for row in rows if row.verdict == "unseen"]
    if unseen:
        problem = f"{counted(len(unseen), 'module')} saw no token: {shortened(unseen, 3)}"
        hint = "Measure with more data, or with all experts."
        yield Finding("warning", "coverage", unseen[0], problem, hint)
    notes = folder.notes.get("notes")
    for name, told in notes.items() if isinstance(notes, Mapping) else ():
        yield Finding("warning", "recipe", str(name), str(told))
    for row in sorted(rows, key=lambda row: -(row.output_error or 0.0)):
        if row.verdict == "hurts":
            times = f", {row.times_median:.1f} times the median" if row.times_median else ""
            problem = f"its output loses {row.output_error:.1%}{times}"
            yield Finding("warning", "output error", row.name, problem, " ".join(row.reasons))


def _missing(
    folder: CheckpointFolder, rows: Sequence[ModuleFacts], source: SourceModel | None
) -> Iterable[str]:
    """Say what is not known of a checkpoint, and what would help."""
    quantized = [row for row in rows if row.name in folder.schemes]
    anew = "" if source is None else " (its weights could not be compared with the source's)"
    if quantized and all(row.weight_error is None for row in quantized):
        yield f"Errors of weights are not known; give the source model to have them found{anew}"
    if quantized and all(row.by_weight is None for row in quantized):
        yield (
            "Errors of outputs are not known: measure with --collect outputs before quantizing, or "
            f"give measurements and the source model{anew}"
        )
