"""``calipers evaluate``."""

from __future__ import annotations

from calipers.cli.command import Report


def evaluate() -> Report:
    """To be written.

    Example: calipers evaluate
    """
    return Report({}, "nothing")
