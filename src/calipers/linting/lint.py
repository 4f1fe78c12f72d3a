"""``calipers.lint``: one pass over the files of a checkpoint, and what was found in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_module import StoredModule
from calipers.checkpoint.stored_weights import OriginalModel
from calipers.errors import counted
from calipers.linting.check import CHECKS, SEVERITIES, Finding
from calipers.linting.codes import LintedWeight
from calipers.notebook import NotebookView


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
            weight = LintedWeight.of(module.name, stored, original)
            weights.append(weight)
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
