"""What a check of lint is, what it finds, and where checks come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from calipers.registry import Registry

if TYPE_CHECKING:
    from calipers.checkpoint.quantized import QuantizedCheckpoint
    from calipers.checkpoint.stored_module import StoredModule
    from calipers.linting.codes import LintedWeight

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


class Check:
    """Base of checks: a subclass overrides what it looks at, and gives a finding for each problem.

    Tensors are read only when a check asks for them.
    """

    def of_checkpoint(self, checkpoint: QuantizedCheckpoint) -> Iterable[Finding]:  # noqa: ARG002
        """Check a checkpoint as a whole."""
        return ()

    def of_module(self, module: StoredModule) -> Iterable[Finding]:  # noqa: ARG002
        """Check a module of a checkpoint, quantized or not."""
        return ()

    def of_weight(self, weight: LintedWeight) -> Iterable[Finding]:  # noqa: ARG002
        """Check a quantized weight whose tensors are there and fit each other."""
        return ()


CHECKS: Registry[type[Check]] = Registry(
    "check",
    "calipers.checks",
    {
        "files": "calipers.linting.tensors:FilesCheck",
        "tensors": "calipers.linting.tensors:TensorsCheck",
        "values": "calipers.linting.values:ValuesCheck",
        "codes": "calipers.linting.codes:CodesCheck",
    },
    base=Check,
)
"""All checks; packages add theirs by entry points."""
