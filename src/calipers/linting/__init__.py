"""Whether a quantized checkpoint is sound: its config, its files and the values in them."""

from calipers.linting.check import Finding
from calipers.linting.codes import LintedWeight
from calipers.linting.lint import LintResult, lint

__all__ = ["Finding", "LintResult", "LintedWeight", "lint"]
