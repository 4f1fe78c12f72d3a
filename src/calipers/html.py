"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice

_MOST_ROWS = 60


def html_table(
    rows: Sequence[Mapping[str, object]], caption: str = "", *, most: int = _MOST_ROWS
) -> str:
    """Return rows as a table of HTML; nothing in them is taken for markup.

    :param rows: each with the same columns
    :param most: how many rows are shown; the rest is counted

    >>> html_table([{"name": "a<b"}])
    '<table><thead><tr><th>name</th></tr></thead><tbody><tr><td>a&lt;b</td></tr></tbody></table>'
    """
    columns = list(rows[0]) if rows else []
    lines = [_row("td", row.values()) for row in islice(rows, most)]
    if len(rows) > most:
        lines.append(f'<tr><td colspan="{len(columns)}">… and {len(rows) - most:,} more</td></tr>')
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = f"<thead>{_row('th', columns)}</thead>" if columns else ""
    return f"<table>{title}{head}<tbody>{''.join(lines)}</tbody></table>"


def facts_table(facts: Mapping[str, object], caption: str = "") -> str:
    """Return names and what there is to say about each as a table of HTML."""
    lines = (
        f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>"
        for name, fact in facts.items()
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<tbody>{''.join(lines)}</tbody></table>"


def _row(kind: str, cells: Iterable[object]) -> str:
    inside = "".join(f"<{kind}>{escape(str(cell))}</{kind}>" for cell in cells)
    return f"<tr>{inside}</tr>"
