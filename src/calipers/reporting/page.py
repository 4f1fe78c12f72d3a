"""The page: one HTML document with its style, its scripts and its data in it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from calipers import __version__
from calipers.errors import ConfigurationError, format_size
from calipers.judging.losses import format_decibels
from calipers.linting import Finding
from calipers.measurements.summary import Magnitudes
from calipers.reporting.content import CheckpointFacts, Content, InputDetail
from calipers.reporting.inputs import ChosenRange
from calipers.reporting.modules import (
    format_share,
    kind_of,
    layer_of,
    short_kinds,
)


def page_data(content: Content) -> dict[str, Any]:
    """Return all that the script shows, as plain data."""
    names, kinds = content.names, short_kinds(content.names)
    predictions: dict[str, dict[str, float | None]] = {}
    for each in content.predictions:
        predictions.setdefault(each.scheme, {})[each.module] = short(each.error)
    evaluated = () if content.evaluation is None else content.evaluation.models
    return {
        "modules": [
            {
                "name": name,
                "layer": layer_of(name),
                "kind": None if layer_of(name) is None else kinds[kind_of(name)],
            }
            for name in names
        ],
        "kinds": list(kinds.values()),
        "checkpoints": [_checkpoint(each) for each in content.checkpoints],
        "inputs": [_input(each) for each in content.inputs],
        "weights": {
            name: {
                "shape": [weight.rows, weight.columns],
                "histogram": _histogram(weight.values),
                "largest": short(weight.values.largest),
                "rms": short(weight.values.rms),
            }
            for name, weight in content.weights.items()
        },
        "predictions": predictions,
        "layers": {
            model.name: [[each.layer, short(each.own), short(each.output)] for each in model.layers]
            for model in evaluated
            if model.layers
        },
        "sufficiency": {each.tensor: [each.is_enough, each.reason] for each in content.sufficiency},
    }


def _checkpoint(facts: CheckpointFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "rows": {
            row.name: {
                "scheme": row.scheme,
                "bits": short(row.bits),
                "size": row.size,
                "weight": short(row.weight_error),
                "output": short(row.output_error),
                "byWeight": short(row.costs.weight),
                "byInput": short(row.costs.input_error),
                "tokens": row.tokens,
                "times": short(row.times_median),
                "chosen": ", ".join(f"{k} {v:g}" for k, v in row.costs.chosen.items()) or None,
                "verdict": row.verdict,
                "why": list(row.reasons),
            }
            for row in facts.modules
        },
        "chosen": {name: _range(each) for name, each in facts.chosen.items()},
        "limits": {
            name: [short(each.least), short(each.median), short(each.largest), each.groups]
            for name, each in facts.limits.items()
        },
    }


def _range(chosen: ChosenRange) -> list[Any]:
    return [chosen.observer, *map(short, (chosen.low, chosen.high, chosen.step, *chosen.shares))]


def _input(detail: InputDetail) -> dict[str, Any]:
    channels = detail.channels
    return {
        "readers": list(detail.readers),
        "tokens": detail.tokens,
        "exact": detail.exact,
        "histogram": _histogram(detail.histogram),
        "channels": channels
        and {
            "count": channels.count,
            "width": channels.width,
            "low": list(map(short, channels.lows)),
            "high": list(map(short, channels.highs)),
            "median": short(channels.median),
            "outliers": channels.outliers,
            "worst": [[c.index, *map(short, (c.low, c.high, c.times))] for c in channels.worst],
        },
        "ranges": [[each.format, list(map(_range, each.ranges))] for each in detail.by_format],
    }


def _histogram(found: Magnitudes | None) -> list[Any] | None:
    return None if found is None else [found.exponent, list(found.counts), found.zeros]


def short(number: float | None) -> float | None:
    """Return a number with four significant digits; None where there is no finite one."""
    return float(f"{number:.4g}") if number is not None and math.isfinite(number) else None


PLOTLY = "plotly-cartesian.min.js"
"""The part of plotly.js that draws bars, lines and heat maps; it evaluates no text as code."""

_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def page(content: Content) -> str:
    """Return the document. All that comes from files is text in it, whatever it looks like."""
    findings, checkpoints, evaluation = _findings(content), content.checkpoints, content.evaluation
    worst = [(each.name, each.ranked[0]) for each in checkpoints if each.ranked]
    headline = max(worst, key=lambda pair: pair[1].output_error or 0.0, default=None)
    rows = [row for each in checkpoints for row in each.modules]
    tokens = [row.tokens for row in rows if row.tokens is not None]
    ends = sorted({min(tokens), max(tokens)}) if tokens else []
    template = _environment().from_string(_asset("page.html"))
    scripts = [_asset(PLOTLY), _asset("page.js")]
    text: str = template.render(
        policy=_policy(scripts),
        style=_asset("page.css"),
        scripts=scripts,
        data=json_for_script(page_data(content)),
        content=content,
        version=__version__,
        headline=headline and {"checkpoint": headline[0], "row": headline[1]},
        checkpoints=[
            {
                "facts": each,
                "scores": None if evaluation is None else evaluation.of(each.name),
                "part": each.size / content.source_size if content.source_size else None,
                "worst": next(iter(each.ranked), None),
                "hurting": sum(row.verdict == "hurts" for row in each.modules),
            }
            for each in checkpoints
        ],
        findings=findings,
        severities=Counter(_severity(one) for _, one in findings),
        coverage=" to ".join(f"{count:,}" for count in ends) + " tokens by module" if ends else "",
        missing=[
            *content.missing,
            *(f"{each.name}: {text}" for each in checkpoints for text in each.missing),
        ],
        scarce=[each for each in content.sufficiency if not each.is_enough],
    )
    return text


def json_for_script(data: Any) -> str:
    """Return JSON that nothing in it can end the element of a script with."""
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
