"""Whether a weight uses its codes well, and what has become of the original."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationType

from calipers.checkpoint.stored_module import StoredModule
from calipers.linting.against import Comparison, Original
from calipers.linting.codes import CodeCounts, count_codes, grid_of, usual_saturation
from calipers.linting.results import Finding, LintedWeight
from calipers.numerics.layout import granularity_name

_AGAIN = "Quantize this module again; look at its weight and at the data of the calibration."
_LEAST_SATURATED = 0.02
_ODDS = 8.0
"""So many times the usual odds of a code at the ends are suspicious."""
_VALUES_PER_CODE = 8
_TIMES = 3.0
"""So many times the error of scales from extrema is far too much."""
_ROUNDINGS = 2.0**-8
"""What storing weights and scales in 16 bits may add to an error."""


@dataclass(frozen=True)
class InspectedWeight:
    """A quantized weight whose tensors are there and fit each other.

    :param counts: how its codes are used; None where Calipers does not know the format
    :param comparison: what it has lost; None where there is no original to compare it with
    """

    name: str
    args: QuantizationArgs
    form: CompressionFormat
    shape: tuple[int, ...]
    counts: CodeCounts | None = None
    comparison: Comparison | None = None

    @classmethod
    def of(cls, module: StoredModule, original: Original | None) -> InspectedWeight:
        """Read the codes of a sound module."""
        args, form, shape, codes = module.weights, module.form, module.shape, module.codes
        assert args is not None
        assert form is not None
        assert shape is not None
        assert codes is not None
        if grid_of(args) is None:
            return cls(module.name, args, form, shape)
        counts = count_codes(codes.map(), form, args, shape)
        comparison = None if original is None else original.compare(module)
        return cls(module.name, args, form, shape, counts, comparison)

    def summary(self) -> LintedWeight:
        """Return what the result of lint tells of it."""
        counts, comparison = self.counts, self.comparison
        return LintedWeight(
            self.name,
            f"{QuantizationType(self.args.type).value}{self.args.num_bits} "
            f"{granularity_name(self.args)}",
            self.shape,
            codes_used=None if counts is None else counts.used,
            codes=None if counts is None else counts.available,
            saturated=None if counts is None else counts.saturated,
            error=None if comparison is None else comparison.stored.error,
            usual_error=None if comparison is None else comparison.usual.error,
        )


def check_codes(weight: InspectedWeight) -> Iterator[Finding]:
    """Find codes that the format does not have, and weights that use theirs badly."""
    name, counts = weight.name, weight.counts
    if counts is None:
        return
    if counts.outside:
        problem = f"has {counts.outside:,} codes that {weight.args.num_bits} bits do not have"
        hint = "Correct num_bits of the config, or quantize the module again."
        yield Finding("error", "code-range", name, problem, hint)
    if counts.nan:
        yield Finding("error", "code-nan", name, f"has {counts.nan:,} codes that are NaN", _AGAIN)
    usual = usual_saturation(weight.args, weight.form, weight.shape)
    odds = _ODDS * usual / (1 - usual)
    if counts.saturated > max(_LEAST_SATURATED, odds / (1 + odds)):
        problem = (
            f"has {counts.saturated:.1%} of its values at the lowest or highest code, where "
            f"normal values would have about {usual:.1%}"
        )
        hint = "Its scales are too small, or belong to another weight: quantize it again."
        yield Finding("warning", "codes-saturated", name, problem, hint)
    many = counts.total >= _VALUES_PER_CODE * counts.available
    if many and counts.used <= max(1, counts.available // 4):
        problem = f"uses {counts.used} of {counts.available} codes"
        hint = "Its scales are too large, or its values are all alike: look at the weight."
        yield Finding("warning", "codes-unused", name, problem, hint)


def check_original(weight: InspectedWeight) -> Iterator[Finding]:
    """Find a weight that has lost far more than its format costs."""
    if weight.comparison is None:
        return
    error, usual = weight.comparison.stored.error, weight.comparison.usual.error
    if error <= _TIMES * usual + _ROUNDINGS:
        return
    problem = (
        f"differs from the original by {error:.1%} of its norm; scales from its extrema "
        f"would give {usual:.1%}"
    )
    hint = (
        "Its codes or scales are damaged or belong to another weight, unless its values were "
        "changed on purpose before (smoothing, rotations, training)."
    )
    yield Finding("error", "error-high", weight.name, problem, hint)
