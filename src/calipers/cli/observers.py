"""``calipers observers``."""

from __future__ import annotations

from calipers.cli.command import Report


def observers() -> Report:
    """To be written.

    Example: calipers observers
    """
    return Report({}, "nothing")
