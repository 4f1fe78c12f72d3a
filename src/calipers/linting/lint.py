"""``calipers.lint``: one pass over the files of a checkpoint, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_weights import OriginalModel
from calipers.linting.against import check_same_weights
from calipers.linting.check import CHECKS
from calipers.linting.codes import InspectedWeight
from calipers.linting.results import SEVERITIES, Finding, LintedWeight, LintResult


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
        if module.is_sound:
            weight = InspectedWeight.of(module, original)
            weights.append(weight.summary())
            for check in checks:
                findings += check.of_weight(weight)
    if original is not None:
        findings += check_same_weights(original, checkpoint.modules.values())
    return LintResult(
        str(checkpoint.folder),
        tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
        tuple(weights),
        len(checkpoint.tensors),
        None if original is None else str(original.folder),
    )
