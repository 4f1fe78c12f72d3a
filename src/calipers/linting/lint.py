"""``calipers.lint``: one pass over the files of a checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_module import StoredModule
from calipers.linting.against import Original
from calipers.linting.file_checks import (
    check_index,
    check_model_known,
    check_recorded_costs,
    check_weights_of_model,
)
from calipers.linting.results import Finding, LintedWeight, LintResult, by_severity
from calipers.linting.tensor_checks import (
    check_fitting,
    check_groups,
    check_noted_shape,
    check_present,
    check_quantized,
    check_unwanted,
)
from calipers.linting.value_checks import (
    check_fused,
    check_padding,
    check_plain,
    check_scales,
    check_zero_points,
)
from calipers.linting.weights import InspectedWeight, check_codes, check_original

OF_CHECKPOINTS: tuple[Callable[[QuantizedCheckpoint], Iterator[Finding]], ...] = (
    check_model_known,
    check_index,
    check_weights_of_model,
    check_fused,
    check_recorded_costs,
)
"""What is looked at once."""

OF_MODULES: tuple[Callable[[StoredModule], Iterator[Finding]], ...] = (
    check_quantized,
    check_present,
    check_fitting,
    check_noted_shape,
    check_groups,
    check_unwanted,
    check_scales,
    check_plain,
    check_zero_points,
    check_padding,
)
"""What is looked at in every module."""

OF_WEIGHTS: tuple[Callable[[InspectedWeight], Iterator[Finding]], ...] = (
    check_codes,
    check_original,
)
"""What is looked at in quantized weights whose tensors are there and fit each other."""


def lint(checkpoint: str | Path, against: str | Path | None = None) -> LintResult:
    """Look for what is wrong in a checkpoint in a format of compressed-tensors, by any writer.

    The model is not loaded: tensors are read one by one.

    :param checkpoint: its folder
    :param against: the folder of the model that it was made from; the error of each weight is
        measured then
    """
    opened = QuantizedCheckpoint.open(checkpoint, damaged=True)
    return lint_checkpoint(opened, None if against is None else Original.open(Path(against)))


def lint_checkpoint(
    checkpoint: QuantizedCheckpoint, original: Original | None = None
) -> LintResult:
    """Look for what is wrong in a checkpoint that is open already."""
    findings = [finding for check in OF_CHECKPOINTS for finding in check(checkpoint)]
    weights: list[LintedWeight] = []
    for module in checkpoint.modules.values():
        for check_module in OF_MODULES:
            findings += check_module(module)
        if module.is_sound:
            weight = InspectedWeight.of(module, original)
            weights.append(weight.summary())
            for check_weight in OF_WEIGHTS:
                findings += check_weight(weight)
    if original is not None:
        findings += original.unlike(checkpoint.modules.values())
    return LintResult(
        str(checkpoint.folder),
        by_severity(findings),
        tuple(weights),
        len(checkpoint.tensors),
        None if original is None else str(original.folder),
    )
