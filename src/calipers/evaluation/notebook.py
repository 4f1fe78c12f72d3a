"""How an evaluation looks in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calipers.errors import counted
from calipers.html import html_table, svg_bars, svg_heat_map

if TYPE_CHECKING:
    from calipers.evaluation.bootstrap import Estimate
    from calipers.evaluation.results import Evaluation


_PERCENT = (0.1, 100.0)


def in_one_line(found: Evaluation) -> str:
    """Return the figures that matter most."""
    scores = [
        f"{name} {each.perplexity.value:.4f} ({_interval(each.change, '+.4f')})"
        for name, each in found.checkpoints.items()
    ]
    base = f"perplexity {found.base.perplexity.value:.4f}"
    return f"Evaluation({'; '.join([_amount(found), base, *scores])})"


def as_html(found: Evaluation) -> str:
    """Return all figures but those of layers."""
    blank = dict.fromkeys(("change", "KL divergence", "top-1 agreement"), "")
    base = {"model": "the float model", "perplexity": f"{found.base.perplexity.value:.4f}", **blank}
    rows = [
        {
            "model": name,
            "perplexity": f"{each.perplexity.value:.4f}",
            "change": _interval(each.change, "+.4f"),
            "KL divergence": _interval(each.kl, ".5f"),
            "top-1 agreement": _interval(each.agreement, ".2%"),
        }
        for name, each in found.checkpoints.items()
    ]
    told = html_table([base, *rows], f"{_amount(found)}; in brackets: 95 % intervals")
    divergence = {name: each.kl.value for name, each in found.checkpoints.items()}
    return told + svg_bars(divergence, "KL divergence", form=".5f") + _layers(found)


def _layers(found: Evaluation) -> str:
    """Return the errors of decoder layers as a map, where they were measured."""
    measured = {name: each.layers for name, each in found.checkpoints.items() if each.layers}
    if not measured:
        return ""
    layers = [layer.layer for layer in next(iter(measured.values()))]
    values = [[100 * layer.output for layer in row] for row in zip(*measured.values(), strict=True)]
    title = "error at the output of each layer, in percent"
    return svg_heat_map(layers, list(measured), values, title, form=".2f", ends=_PERCENT)


def _amount(found: Evaluation) -> str:
    return f"{counted(found.samples, 'sample')}, {found.tokens:,} tokens predicted"


def _interval(estimate: Estimate, form: str) -> str:
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"
