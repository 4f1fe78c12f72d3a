"""Whether a quantized checkpoint is sound: its config, its files and the values in them."""

from calipers.linting.lint import lint
from calipers.linting.results import Finding, LintedWeight, LintResult

__all__ = ["Finding", "LintResult", "LintedWeight", "lint"]
