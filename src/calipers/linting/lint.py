"""``calipers.lint``: one pass over the files of a checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from compressed_tensors.quantization import QuantizationType

from calipers.linting.against import Original, check_original
from calipers.linting.codes import CodeCounts, count_codes, grid_of
from calipers.linting.contents import read_contents
from calipers.linting.modules import StoredModule, read_model, read_modules
from calipers.linting.recorded import check_recorded
from calipers.linting.results import Finding, LintedWeight, LintResult, by_severity
from calipers.linting.settings import read_settings
from calipers.linting.tensor_checks import (
    check_fitting,
    check_present,
    check_quantized,
    check_unwanted,
    check_weights_of_model,
    is_sound,
)
from calipers.linting.value_checks import (
    check_codes,
    check_fused,
    check_padding,
    check_plain,
    check_scales,
    check_zero_points,
)
from calipers.numerics.layout import granularity_name

ModuleCheck = Callable[[StoredModule], Iterator[Finding]]

OF_MODULES: tuple[ModuleCheck, ...] = (
    check_quantized,
    check_present,
    check_fitting,
    check_unwanted,
    check_scales,
    check_plain,
)
"""What is looked at in every module."""

OF_SOUND_WEIGHTS: tuple[ModuleCheck, ...] = (check_zero_points, check_padding)
"""What is looked at where tensors are there and fit each other."""


def lint(checkpoint: str | Path, against: str | Path | None = None) -> LintResult:
    """Look for what is wrong in a checkpoint in a format of compressed-tensors, by any writer.

    The model is not loaded: tensors are read one by one.

    :param checkpoint: its folder
    :param against: the folder of the model that it was made from; the error of each weight is
        measured then
    """
    folder = Path(checkpoint)
    settings = read_settings(folder)
    contents = read_contents(folder)
    original = None if against is None else Original.open(Path(against))
    model, findings = read_model(contents)
    modules = read_modules(contents, settings, model)
    findings += [*contents.findings, *check_weights_of_model(model, modules)]
    findings += check_fused(modules)
    findings += check_recorded(folder)
    weights: list[LintedWeight] = []
    for module in modules:
        for check in OF_MODULES:
            findings += check(module)
        if is_sound(module):
            weights.append(_weight(module, original, findings))
        elif module.weights is None:
            findings += check_zero_points(module)
    if original is not None:
        findings += original.unlike(modules)
    return LintResult(
        str(folder),
        by_severity(findings),
        tuple(weights),
        len(contents.tensors),
        None if against is None else str(against),
    )


def _weight(
    module: StoredModule, original: Original | None, findings: list[Finding]
) -> LintedWeight:
    """Look at the codes of a weight, and at what has become of the original."""
    args = module.weights
    assert args is not None
    assert module.shape is not None
    kind = f"{QuantizationType(args.type).value}{args.num_bits}"
    told = LintedWeight(module.name, f"{kind} {granularity_name(args)}", module.shape)
    for check in OF_SOUND_WEIGHTS:
        findings += check(module)
    if grid_of(args) is None:
        return told
    counts = _counts(module)
    findings += check_codes(module, counts)
    told = replace(told, codes_used=counts.used, codes=counts.available, saturated=counts.saturated)
    if original is None:
        return told
    compared = original.compare(module)
    if compared is None:
        return told
    findings += check_original(module, compared)
    return replace(told, error=compared.stored.error, usual_error=compared.usual.error)


def _counts(module: StoredModule) -> CodeCounts:
    assert module.codes is not None
    assert module.form is not None
    assert module.weights is not None
    assert module.shape is not None
    return count_codes(module.codes.map(), module.form, module.weights, module.shape)
