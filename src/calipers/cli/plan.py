"""``calipers plan``."""

from __future__ import annotations

from calipers.cli.command import Report


def plan() -> Report:
    """To be written.

    Example: calipers plan
    """
    return Report({}, "nothing")
