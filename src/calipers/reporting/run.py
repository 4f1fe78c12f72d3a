"""calipers.report: from files to one page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from calipers.advice import Advice
from calipers.checkpoint.location import check_location
from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_weights import OriginalModel
from calipers.errors import (
    CalipersError,
    ConfigurationError,
    MeasurementsError,
    Option,
    counted,
)
from calipers.files.writing import check_output_file, output_file
from calipers.kernels.resources import kernels_only
from calipers.linting import Finding
from calipers.linting.lint import lint_checkpoint
from calipers.measurements import Measurements
from calipers.reporting.content import Content, gather
from calipers.reporting.inputs import Measured
from calipers.reporting.outside import (
    Prediction,
    Sufficiency,
    read_advice,
    read_evaluation,
)
from calipers.reporting.page import page

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Report:
    """What is known of checkpoints, and the page that shows it.

    :param output_file: where the page is; None if it was not written
    """

    content: Content
    output_file: Path | None = None

    def __repr__(self) -> str:
        checkpoints = counted(len(self.content.checkpoints), "checkpoint")
        modules = counted(len(self.content.names), "module")
        place = "" if self.output_file is None else f", written to {self.output_file}"
        return f"Report({self.content.model}, {checkpoints}, {modules}{place})"

    def html(self) -> str:
        """Return the page: one HTML document that needs nothing beside it."""
        return page(self.content)

    def save(self, path: PathLike, *, overwrite: bool = False) -> Path:
        """Write the page, whole or not at all, and return its path."""
        target = check_output_file(path, overwrite)
        content = self.html().encode("utf-8")
        with output_file(target) as place:
            place.write([content], overwrite=overwrite)
        return target


def report(
    checkpoints: PathLike | Sequence[PathLike],
    measurements: Measurements | PathLike | None = None,
    output_file: PathLike | None = None,
    *,
    source: PathLike | None = None,
    evaluation: PathLike | None = None,
    advice: Advice | PathLike | Sequence[Prediction] | None = None,
    findings: Mapping[str, Sequence[Finding]] | None = None,
    sufficiency: Iterable[Sufficiency] | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Report:
    """Show which layers of quantized checkpoints hurt, and why, on one page of HTML.

    :param checkpoints: folders of quantized checkpoints of one model, one or several
    :param measurements: what :func:`calipers.measure` has found of the model, or the file of it
    :param output_file: where the page goes; None: it is not written
    :param source: the folder of the model that they were made from; without it nothing is shown of
        its weights
    :param evaluation: the file of what ``calipers evaluate --json`` printed
    :param advice: what modules would lose under other schemes (of :func:`calipers.advise`), or the
        JSON file of it
    :param findings: name of a checkpoint → what was found wrong with it; None: what
        :func:`calipers.lint` finds
    :param sufficiency: whether enough data was seen of tensors; None: what measurements tell
    :param overwrite: whether a file that is there may be replaced
    """
    if isinstance(checkpoints, (str, os.PathLike)):
        checkpoints = [checkpoints]
    folders = [os.fspath(each) for each in checkpoints]
    if not folders:
        raise ConfigurationError("There is no checkpoint to report on", hint="Give one or more.")
    target = None
    if output_file is not None:
        inputs: dict[str, object] = {f"checkpoint {path}": path for path in folders}
        inputs |= {"measurements": measurements, "source": source}
        inputs |= {"evaluation": evaluation, "advice": advice}
        target = check_output_file(output_file, overwrite, inputs)
    counts: Counter[str] = Counter()
    opened = []
    for path in folders:
        name = os.path.basename(os.path.realpath(path))
        counts[name] += 1  # those of equal names are told apart by their numbers
        unique = name if counts[name] == 1 else f"{name} ({counts[name]})"
        opened.append(QuantizedCheckpoint.open(path, name=unique))
    model, missing = _source(source, opened[0], trust_remote_code)
    seen = measurements
    if seen is not None and not isinstance(seen, Measurements):
        seen = Measurements.load(seen)
    predictions: Iterable[Prediction] = ()
    if isinstance(advice, Advice):
        predictions = [
            Prediction(each.module, each.scheme, each.error) for each in advice.predictions
        ]
    elif isinstance(advice, (str, os.PathLike)):
        predictions = read_advice(Path(advice))
    elif advice is not None:
        predictions = advice
    with kernels_only():
        if findings is None:
            findings = {each.name: lint_checkpoint(each).findings for each in opened}
        content = gather(
            opened,
            _measured(seen, model, missing),
            model,
            evaluation=None if evaluation is None else read_evaluation(Path(evaluation)),
            predictions=tuple(predictions),
            sufficiency=_sufficiency(seen) if sufficiency is None else tuple(sufficiency),
            findings=findings,
            missing=missing,
        )
    made = Report(content)
    if target is None:
        return made
    return Report(content, made.save(target, overwrite=overwrite))


def _source(
    source: PathLike | None, checkpoint: QuantizedCheckpoint, trust_remote_code: bool
) -> tuple[OriginalModel | None, list[str]]:
    """Open the source, by default the one that a config names, or say why it is not shown."""
    if source is not None:
        if not os.path.exists(source):
            check_location(os.fspath(source))
            raise ConfigurationError(
                "is not a folder, and nothing is downloaded for a report",
                subject=Option("source", os.fspath(source)),
                hint="Give the folder of the model that the checkpoints were made from.",
            )
        return OriginalModel.open(source, trust_remote_code=trust_remote_code), []
    named = checkpoint.config.get("_name_or_path")
    if isinstance(named, str) and named and (Path(named) / "config.json").is_file():
        with suppress(CalipersError):  # what a config names may have become anything
            model = OriginalModel.open(named)
            if model.fingerprint:
                return model, []
    return None, ["Distributions of weights, since the source model is not at hand"]


def _sufficiency(seen: Measurements | None) -> list[Sufficiency]:
    """Return whether enough data was seen of each tensor, as far as halves of it tell."""
    if seen is None or not seen.has_halves:
        return []
    result = seen.sufficiency()
    return [
        Sufficiency(
            name,
            each.is_sufficient,
            f"scales and importance would move by about {each.movement:.1%} with more data; "
            f"{result.tolerance:.0%} are allowed",
        )
        for each in result.tensors
        for name in each.readers
    ]


def _measured(
    found: Measurements | None, source: OriginalModel | None, missing: list[str]
) -> Measured:
    if found is None:
        missing.append("Distributions of inputs, since there are no measurements")
        return Measured()
    if source is not None and found.info is not None:
        theirs, own = found.info.fingerprint, source.fingerprint
        if theirs != own:
            raise MeasurementsError(
                f"are of another model, or of other weights of it: {found.info.model} with the "
                f"fingerprint {theirs[:8]}, and the source '{source.name}' has {own[:8]}",
                subject="The measurements",
                hint="Measure this model, or give the source that was measured.",
            )
    measured = Measured.of(found)
    if not measured.outputs:
        missing.append(
            "Errors of outputs as they were measured, since outputs were not (calipers measure "
            "--collect outputs): they are estimated from weights and inputs"
        )
    return measured
