"""``calipers.lint``: one pass over the files of a checkpoint, and what was found in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationType

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_module import StoredModule
from calipers.checkpoint.stored_weights import OriginalModel
from calipers.errors import counted
from calipers.linting.check import CHECKS, SEVERITIES, Finding
from calipers.linting.codes import InspectedWeight
from calipers.notebook import NotebookView
from calipers.numerics.layout import granularity_name


@dataclass(frozen=True)
class LintedWeight:
    """What is known of one quantized weight.

    :param scheme: its format and granularity, such as ``int4 group 128``
    :param codes_used: how many of the codes occur; None where they could not be read
    :param codes: how many different numbers there are codes for
    :param saturated: the share of weights that have the lowest or the highest code
    :param error: ‖Q(W) − W‖ / ‖W‖, where the original is known
    :param usual_error: the same for scales from the extrema of the original
    """

    name: str
    scheme: str
    shape: tuple[int, ...]
    codes_used: int | None = None
    codes: int | None = None
    saturated: float | None = None
    error: float | None = None
    usual_error: float | None = None

    @classmethod
    def of(cls, weight: InspectedWeight) -> LintedWeight:
        """Return what is told of a weight that was inspected."""
        kind, counts = QuantizationType(weight.args.type).value, weight.counts
        return cls(
            weight.name,
            f"{kind}{weight.args.num_bits} {granularity_name(weight.args)}",
            weight.shape,
            codes_used=None if counts is None else counts.used,
            codes=None if counts is None else counts.available,
            saturated=None if counts is None else counts.saturated,
            error=weight.error,
            usual_error=weight.usual_error,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "shape": list(self.shape)}


@dataclass(frozen=True, repr=False)
class LintResult(NotebookView):
    """All findings of a checkpoint, the worst first, and its quantized weights.

    :param against: the model that the weights were compared with
    """

    checkpoint: str
    findings: tuple[Finding, ...]
    weights: tuple[LintedWeight, ...]
    tensors: int
    against: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many findings there are of each severity."""
        found = Counter(finding.severity for finding in self.findings)
        return {severity: found[severity] for severity in SEVERITIES}

    @property
    def checks(self) -> dict[str, tuple[str, ...]]:
        """The names that each check found something about."""
        found: dict[str, list[str]] = {}
        for finding in self.findings:
            found.setdefault(finding.check, []).append(finding.name)
        return {check: tuple(names) for check, names in found.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "checkpoint": self.checkpoint,
            "against": self.against,
            "tensors": self.tensors,
            "counts": self.counts,
            "findings": [finding.as_dict() for finding in self.findings],
            "weights": [weight.as_dict() for weight in self.weights],
        }

    def __repr__(self) -> str:
        counts = [counted(count, severity) for severity, count in self.counts.items() if count]
        weights = counted(len(self.weights), "quantized weight")
        return f"LintResult({self.checkpoint}: {', '.join(counts) or 'nothing found'}; {weights})"


def lint(checkpoint: str | Path, against: str | Path | None = None) -> LintResult:
    """Look for what is wrong in a checkpoint in a format of compressed-tensors, by any writer.

    The model is not loaded: tensors are read one by one.

    :param checkpoint: its folder
    :param against: the folder of the model that it was made from; the error of each weight is
        measured then
    """
    opened = QuantizedCheckpoint.open(checkpoint, damaged=True)
    return lint_checkpoint(opened, None if against is None else OriginalModel.open(against))


def lint_checkpoint(
    checkpoint: QuantizedCheckpoint, original: OriginalModel | None = None
) -> LintResult:
    """Look for what is wrong in a checkpoint that is open already."""
    checks = [check() for _, check in CHECKS.parts()]
    findings: list[Finding] = []
    weights: list[LintedWeight] = []
    for check in checks:
        findings += check.of_checkpoint(checkpoint)
    for module in checkpoint.modules.values():
        for check in checks:
            findings += check.of_module(module)
        stored = module.open_weight()
        if stored is not None:
            weight = InspectedWeight.of(module.name, stored, original)
            weights.append(LintedWeight.of(weight))
            for check in checks:
                findings += check.of_weight(weight)
    if original is not None:
        findings += _other_weights(original, checkpoint.modules.values())
    return LintResult(
        str(checkpoint.folder),
        tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
        tuple(weights),
        len(checkpoint.tensors),
        None if original is None else str(original.folder),
    )


def _other_weights(model: OriginalModel, modules: Iterable[StoredModule]) -> Iterator[Finding]:
    """Find weights that the original does not have, or has in another shape."""
    for module in modules:
        shape = module.shape if module.weights is not None else None
        if shape is None:
            continue
        stored = model.weight(module.name)
        if stored is None:
            problem = f"has a weight, and '{model.folder}' has none of that name"
        elif stored.shape != shape:
            problem = f"has a weight of shape {shape}, and that of the original is {stored.shape}"
        else:
            continue
        hint = "Give the model that the checkpoint was made from."
        yield Finding("error", "other-model", module.name, problem, hint)
