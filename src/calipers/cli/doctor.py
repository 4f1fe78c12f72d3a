"""``calipers doctor``."""

from __future__ import annotations

from calipers.cli.command import Report


def doctor() -> Report:
    """To be written.

    Example: calipers doctor
    """
    return Report({}, "nothing")
