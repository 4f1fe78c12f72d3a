"""What was found in a checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from calipers.errors import counted
from calipers.notebook import NotebookView

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or looks wrong.

    :param check: what was looked at, by an id that stays the same, such as ``scale-nan``
    :param name: the module or tensor, or the file
    :param problem: a sentence
    :param hint: a sentence that says what to do
    """

    severity: Severity
    check: str
    name: str
    problem: str
    hint: str

    def as_dict(self) -> dict[str, str]:
        """Return it as plain data."""
        return asdict(self)


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
