"""``calipers quantize``."""

from __future__ import annotations

from calipers.cli.command import Report


def quantize() -> Report:
    """To be written.

    Example: calipers quantize
    """
    return Report({}, "nothing")
