"""Whether a quantized checkpoint is sound: its config, its files and the values in them."""

from calipers.checkpoint.lint.linting import lint
from calipers.checkpoint.lint.results import Finding, LintedWeight, LintResult

__all__ = ["Finding", "LintResult", "LintedWeight", "lint"]
