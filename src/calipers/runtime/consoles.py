"""The console that bars, tables and messages are printed on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from calipers.errors import printable


class SafeConsole(Console):
    """A console that text from files, such as the name of a tensor, cannot steer.

    All text passes :meth:`render`, where control characters are replaced; what rich itself sends
    to colour text and to move the cursor is no text. Brackets and colons mean nothing.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object to segments of printable text."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text))
