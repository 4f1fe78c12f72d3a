"""What makes a result show a table in a notebook."""

from __future__ import annotations

from importlib import import_module

_VIEWS = "calipers.reporting.notebook"


class NotebookView:
    """Base of results that ``calipers.reporting.notebook`` has a view of.

    That module imports every class with a view, and so comes after all of them. It is loaded by
    its name, when a notebook shows a result.
    """

    def _repr_html_(self) -> str:
        markup: str = import_module(_VIEWS).as_html(self)
        return markup
