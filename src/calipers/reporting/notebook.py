"""How results look in a notebook: tables and small plots, a function for each class."""

from __future__ import annotations

from collections import Counter
from functools import singledispatch

import yaml

from calipers.advice import Advice
from calipers.calibration.coverage import Coverage
from calipers.engine.loop import OneshotResult
from calipers.evaluation import Evaluation
from calipers.judging.losses import DECIBELS, format_decibels, loss_grid, module_losses
from calipers.linting.lint import LintResult
from calipers.measurements import Measurements
from calipers.measurements.store import PEAKS
from calipers.measurements.sufficiency import Sufficiency
from calipers.measurements.summary import LayerGrid
from calipers.planning.plan import Plan
from calipers.recipes import Recipe
from calipers.reporting.html import (
    facts_table,
    html_table,
    svg_bars,
    svg_heat_map,
    svg_histogram,
)

_MOST_SHOWN = 10
_MOST_TENSORS = 12
_PERCENT = (0.1, 100.0)
"""The ends of a scale of errors in percent."""


@singledispatch
def as_html(found: object) -> str:
    """Return what a notebook shows of a result. Names in it are text, never markup."""
    raise TypeError(f"{type(found).__name__} has no view")


@as_html.register
def _(found: Plan) -> str:
    kinds = Counter(f"{t.base_name} {t.format}, {t.strategy}" for _, t in found)
    plot = svg_bars({kind: float(n) for kind, n in kinds.items()}, "tensors", form=",.0f")
    return html_table(found.rows(), repr(found)) + plot


@as_html.register
def _(found: Recipe) -> str:
    rows = [
        {
            "stage": stage.name,
            "modifier": modifier.label(),
            "settings": " ".join(
                yaml.safe_dump(modifier.to_data(), default_flow_style=True, sort_keys=False).split()
            ),
        }
        for stage in found.stages
        for modifier in stage.modifiers
    ]
    return html_table(rows)


@as_html.register
def _(found: Coverage) -> str:
    rows = [
        {"module": name, "tokens": f"{count:,}", "what was done": found.applied.get(name, "")}
        for name, count in sorted(found.tokens.items(), key=lambda pair: pair[1])
    ]
    return html_table(rows, repr(found))


@as_html.register
def _(found: Sufficiency) -> str:
    enough = [each for each in found.tensors if each.is_sufficient]
    rows = [
        {
            "tensor": each.tensor,
            "tokens": each.tokens,
            "minmax": _percent(each.minmax),
            "mse": _percent(each.mse),
            "importance": _percent(each.importance),
            "sufficient": "yes" if each.is_sufficient else "no",
        }
        for each in (*found.worst, *enough)
    ]
    return html_table(rows, repr(found))


@as_html.register
def _(found: Measurements) -> str:
    summary = found.summary()
    rows = summary.pop("tensors")
    peaks = LayerGrid(**summary.pop("peaks"))
    figures = ("min", "max", "rms", "peak")
    extreme = sorted(rows, key=lambda row: -(row["peak"] or 0.0))
    heat = svg_heat_map(
        peaks.layers, peaks.kinds, peaks.values, "max|x| ÷ rms", form=".0f", ends=PEAKS
    )
    table = html_table(
        [
            {
                "tensor": row["tensor"],
                "readers": len(row["readers"]),
                "tokens": f"{row['tokens']:,}",
                **{key: "–" if row[key] is None else f"{row[key]:.4g}" for key in figures},
                "size": f"{row['size']:,}",
            }
            for row in extreme
        ],
        "The most extreme tensors, by the powers of two of their magnitudes",
        most=_MOST_TENSORS,
        plots={"magnitudes": [svg_histogram(row["histogram"]) for row in extreme]},
    )
    return facts_table(summary, repr(found)) + heat + table


@as_html.register
def _(found: OneshotResult) -> str:
    facts = facts_table(found.facts())
    losses = module_losses(found.errors, found.costs)
    if not losses:
        return facts
    by_data = any(loss.of == "output" for loss in losses)
    title = "Modules whose output loses most" if by_data else "Weights that lose most"
    rows = [
        {
            "module": loss.module,
            "dB": "–" if loss.decibels is None else f"{loss.decibels:.1f}",
            "error": f"{loss.error:.2%}",
            "through": loss.reason,
        }
        for loss in losses
    ]
    grid = loss_grid(found.errors, found.costs)
    heat = svg_heat_map(grid.layers, grid.kinds, grid.values, "error in dB", ends=DECIBELS)
    return facts + html_table(rows, title, most=_MOST_SHOWN) + heat


@as_html.register
def _(found: LintResult) -> str:
    columns = ("severity", "check", "name", "problem", "hint")
    findings = [{name: getattr(each, name) for name in columns} for each in found.findings]
    weights = [
        {
            "weight": each.name,
            "scheme": each.scheme,
            "shape": " × ".join(map(str, each.shape)),
            "codes used": "–" if each.codes is None else f"{each.codes_used} of {each.codes}",
            "saturated": _percent(each.saturated),
            "error": _percent(each.error),
        }
        for each in sorted(found.weights, key=lambda each: -(each.error or 0))
    ]
    table = html_table(weights, most=_MOST_SHOWN) if weights else ""
    return html_table(findings, repr(found)) + table


@as_html.register
def _(found: Advice) -> str:
    rows = [
        {
            "module": each.module,
            "scheme": each.choice,
            "error": f"{each.error:.2%}",
            "dB": format_decibels(each.error),
            "loss": "–" if each.loss is None else f"{each.loss:.2g}",
        }
        for each in found.worst()
    ]
    return facts_table(found.facts()) + html_table(rows, "Modules that lose most", most=_MOST_SHOWN)


@as_html.register
def _(found: Evaluation) -> str:
    blank = dict.fromkeys(("change", "KL divergence", "top-1 agreement"), "")
    base = {"model": "the float model", "perplexity": f"{found.base.perplexity.value:.4f}", **blank}
    rows = [
        {
            "model": name,
            "perplexity": f"{each.perplexity.value:.4f}",
            "change": each.change.text("+.4f"),
            "KL divergence": each.kl.text(".5f"),
            "top-1 agreement": each.agreement.text(".2%"),
        }
        for name, each in found.checkpoints.items()
    ]
    table = html_table([base, *rows], f"{found.amount}; in brackets: 95 % intervals")
    divergence = {name: each.kl.value for name, each in found.checkpoints.items()}
    bars = svg_bars(divergence, "KL divergence", form=".5f")
    layers = {name: each.layers for name, each in found.checkpoints.items() if each.layers}
    if not layers:
        return table + bars
    names = [layer.layer for layer in next(iter(layers.values()))]
    errors = [[100 * layer.output for layer in row] for row in zip(*layers.values(), strict=True)]
    title = "error at the output of each layer, in percent"
    return (
        table + bars + svg_heat_map(names, list(layers), errors, title, form=".2f", ends=_PERCENT)
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"
