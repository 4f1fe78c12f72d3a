"""``calipers demo``."""

from __future__ import annotations

from calipers.cli.command import Report


def demo() -> Report:
    """To be written.

    Example: calipers demo
    """
    return Report({}, "nothing")
