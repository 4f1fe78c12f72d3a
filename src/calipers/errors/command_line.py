"""The command line."""

from __future__ import annotations

from calipers.errors.base import ConfigurationError


class OptionsError(ConfigurationError):
    """Options that do not go together, or that cannot be read."""

    def __init__(self, problem: str, allowed: str) -> None:
        super().__init__(f"{problem}. Give {allowed}.")
