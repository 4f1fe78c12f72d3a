"""``calipers schemes``."""

from __future__ import annotations

from calipers.cli.command import Report


def schemes() -> Report:
    """To be written.

    Example: calipers schemes
    """
    return Report({}, "nothing")
