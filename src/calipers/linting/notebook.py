"""How the findings look in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calipers.errors import counted
from calipers.html import html_table

if TYPE_CHECKING:
    from calipers.linting.results import LintedWeight, LintResult


def in_one_line(found: LintResult) -> str:
    """Return how much was found."""
    counts = [counted(count, severity) for severity, count in found.counts.items() if count]
    told = ", ".join(counts) or "nothing found"
    weights = counted(len(found.weights), "quantized weight")
    return f"LintResult({found.checkpoint}: {told}; {weights})"


def as_html(found: LintResult) -> str:
    """Return the findings, and the weights with the largest errors first."""
    findings = [
        {
            "severity": each.severity,
            "check": each.check,
            "name": each.name,
            "problem": each.problem,
            "hint": each.hint,
        }
        for each in found.findings
    ]
    weights = sorted(found.weights, key=lambda each: -(each.error or 0))
    rows = [_row(each) for each in weights]
    return html_table(findings, in_one_line(found)) + (html_table(rows, most=10) if rows else "")


def _row(weight: LintedWeight) -> dict[str, object]:
    return {
        "weight": weight.name,
        "scheme": weight.scheme,
        "shape": " × ".join(map(str, weight.shape)),
        "codes used": "–" if weight.codes is None else f"{weight.codes_used} of {weight.codes}",
        "saturated": "–" if weight.saturated is None else f"{weight.saturated:.2%}",
        "error": "–" if weight.error is None else f"{weight.error:.2%}",
    }
