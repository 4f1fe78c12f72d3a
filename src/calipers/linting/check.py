"""What a check of lint is, and where checks come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from calipers.registry import Registry

if TYPE_CHECKING:
    from calipers.checkpoint.quantized import QuantizedCheckpoint
    from calipers.checkpoint.stored_module import StoredModule
    from calipers.linting.codes import InspectedWeight
    from calipers.linting.results import Finding


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

    def of_weight(self, weight: InspectedWeight) -> Iterable[Finding]:  # noqa: ARG002
        """Check a quantized weight whose tensors are there and fit each other."""
        return ()


CHECKS: Registry[type[Check]] = Registry(
    "check",
    "calipers.checks",
    {
        "files": "calipers.linting.files:FilesCheck",
        "tensors": "calipers.linting.tensors:TensorsCheck",
        "values": "calipers.linting.values:ValuesCheck",
        "codes": "calipers.linting.codes:CodesCheck",
    },
    base=Check,
)
"""All checks; packages add theirs by entry points."""
