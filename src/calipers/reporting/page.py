"""The page: one HTML document with its style, its scripts and its data in it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, NamedTuple

from calipers import __version__
from calipers.errors import ConfigurationError
from calipers.judging.errors import format_decibels
from calipers.linting import Finding
from calipers.reporting.content import CheckpointFacts, Content
from calipers.reporting.data import page_data
from calipers.reporting.modules import ModuleFacts
from calipers.reporting.outside import EvaluatedModel

PLOTLY = "plotly-cartesian.min.js"
"""The part of plotly.js that draws bars, lines and heat maps; it evaluates no text as code."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def page(content: Content) -> str:
    """Return the document. All that comes from files is text in it, whatever it looks like."""
    findings = _findings(content)
    template = _environment().from_string(_asset("page.html"))
    scripts = [_asset(PLOTLY), _asset("page.js")]
    text: str = template.render(
        policy=_policy(scripts),
        style=_asset("page.css"),
        scripts=scripts,
        data=json_for_script(page_data(content)),
        content=content,
        version=__version__,
        headline=_headline(content),
        checkpoints=[_Shown.of(each, content) for each in content.checkpoints],
        findings=findings,
        severities=Counter(_severity(one) for _, one in findings),
        coverage=_coverage(content),
        missing=_missing(content),
        scarce=[each for each in content.sufficiency if not each.is_enough],
    )
    return text


def json_for_script(data: Any) -> str:
    """Return JSON that nothing in it can end the element of a script with.

    >>> print(json_for_script({"name": "</script>&"}))
    {"name":"\\u003c/script\\u003e\\u0026"}
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_ESCAPED)


def _policy(scripts: Iterable[str]) -> str:
    """Return the rules of the document: nothing is loaded, and no scripts run but its own."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (files("calipers.reporting") / "assets" / name).read_text(encoding="utf-8").strip()


def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise ConfigurationError(
            "A report needs the package jinja2, which is not installed",
            hint="Install it with pip install 'calipers[report]'.",
        ) from None
    made = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {
        "size": format_size,
        "share": format_share,
        "decibels": format_decibels,
        "severity": _severity,
        "value": lambda found, form: "–" if found is None else f"{found.value:{form}}",
        "bounds": lambda found, form: f"{found.low:{form}} to {found.high:{form}}",
    }
    return made


# What is put into words


def format_size(size: float | None) -> str:
    """Return a size with a unit.

    >>> format_size(657_664), format_size(None)
    ('658 kB', '–')
    """
    if size is None:
        return "–"
    power = 0
    while abs(size) >= 999.5 and power < len(_UNITS) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {_UNITS[power]}"


def format_share(share: float | None) -> str:
    """Return a share in percent.

    >>> format_share(0.1234), format_share(0.00001), format_share(None)
    ('12.3 %', '0.001 %', '–')
    """
    return "–" if share is None else f"{100 * share:.3g} %"


class _Shown(NamedTuple):
    """A row of the table of checkpoints."""

    facts: CheckpointFacts
    scores: EvaluatedModel | None
    part: float | None
    worst: ModuleFacts | None
    hurting: int

    @classmethod
    def of(cls, facts: CheckpointFacts, content: Content) -> _Shown:
        ranked = facts.ranked
        return cls(
            facts,
            None if content.evaluation is None else content.evaluation.of(facts.name),
            facts.size / content.source_size if content.source_size else None,
            ranked[0] if ranked else None,
            sum(row.verdict == "hurts" for row in facts.modules),
        )


class _Headline(NamedTuple):
    """The module that hurts most, of all checkpoints."""

    checkpoint: str
    row: ModuleFacts


def _headline(content: Content) -> _Headline | None:
    worst = [_Headline(each.name, each.ranked[0]) for each in content.checkpoints if each.ranked]
    return max(worst, key=lambda each: each.row.output_error or 0.0, default=None)


def _findings(content: Content) -> list[tuple[str, Finding]]:
    """Return what needs attention, the worst first: checkpoint and finding."""
    ranks = {"error": 0, "warning": 1}
    found = [(each.name, one) for each in content.checkpoints for one in each.findings]
    for scores in content.evaluation.models[1:] if content.evaluation else ():
        for note in scores.notes:
            found.append((scores.name, Finding("note", "evaluation", "", note, "")))
    return sorted(found, key=lambda pair: ranks.get(pair[1].severity, 2))


def _severity(found: Finding) -> str:
    """Return one of the three that the page has a colour for."""
    return found.severity if found.severity in ("error", "warning") else "info"


def _coverage(content: Content) -> str:
    """Say how many tokens modules have seen."""
    rows = [row for each in content.checkpoints for row in each.modules]
    seen = [row.tokens for row in rows if row.tokens is not None]
    if not seen:
        return ""
    least, most = min(seen), max(seen)
    amount = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{amount} tokens by module"


def _missing(content: Content) -> list[str]:
    told = list(content.missing)
    for each in content.checkpoints:
        told += [f"{each.name}: {text}" for text in each.missing]
    return told
