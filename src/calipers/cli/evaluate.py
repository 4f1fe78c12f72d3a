"""``calipers evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.app import CommandOutput, show, tell
from calipers.cli.options import Data, Model, data_source, model_source, packed
from calipers.cli.rendering import format_difference, table
from calipers.errors import Mistakes, format_size
from calipers.options import ComputeOptions, DataOptions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from calipers.evaluation import CheckpointScores, Evaluation, Scores

Checkpoints = Annotated[
    list[str] | None,
    typer.Argument(metavar="OUT", help="Checkpoints that were made from it, any number."),
]
Layers = Annotated[
    bool,
    typer.Option("--layers/--no-layers", help="Measure the error of each layer; takes longer."),
]


_ABOUT_NOISE = (
    "A change or a distance whose interval holds 0 may be noise; so may one below its noise floor, "
    "by which roundings alone can move it: that of the noisier of the two models."
)
_WORSE_THAN_CHANCE = (
    "The float model predicts worse than chance: its perplexity is above the {:,} tokens of its "
    "vocabulary. Look at its weights, its tokenizer and the text before you trust the rest."
)
_ABOUT_LAYERS = (
    "‖h′ − h‖ / ‖h‖ at the output of each layer: what it adds by itself → what has come together."
)


def evaluate(
    model: Model,
    checkpoints: Checkpoints = None,
    data: Data = None,
    layers: Layers = True,
    *,
    taken: DataOptions,
    compute: ComputeOptions,
) -> CommandOutput:
    """Compare checkpoints with the model they were made from.

    Tells perplexity, KL divergence and top-1 agreement, with intervals of 95 % that are paired on
    the same text, and the error of each layer. If it ends early, what was done is shown.

    Example: calipers evaluate demo demo-w4a16 --data demo
    """
    from calipers.engine.job import check_compute_options, check_data_options

    mistakes, taken = Mistakes(), packed(taken, data)
    dataset = mistakes.check(data_source, data, "evaluation", "evaluate on")
    source = mistakes.check(model_source, model)
    quantized = [mistakes.check(model_source, each) for each in checkpoints or ()]
    mistakes.check(check_data_options, taken)
    mistakes.check(check_compute_options, compute)
    mistakes.tell()
    from calipers.evaluation import evaluate as compare

    name = Path(model).name
    judged: list[Evaluation] = []  # after each model, the last one holds all

    def add(result: Evaluation) -> None:
        judged.append(result)
        scores: Scores = result.base
        last, note = name, ", worse than chance" if result.is_worse_than_chance else ""
        if result.checkpoints:
            last, scores = list(result.checkpoints.items())[-1]
            note = f", change {format_difference(scores.change)}"
        text = f"{last}: perplexity {scores.perplexity.value:.4f}{note}"
        tell({"evaluated": {"name": last, **scores.as_dict()}}, text)

    def output(unfinished: str = "") -> CommandOutput:
        data = {"model": model, "complete": not unfinished, **judged[-1].as_dict()}
        return CommandOutput(data, _view(name, judged[-1], unfinished))

    try:
        compare(source, quantized, dataset, layers=layers, each=add, data=taken, compute=compute)
    except BaseException:
        if judged:
            done = len(judged[-1].checkpoints)
            show(output(f"Not complete: {done} of {len(quantized)} checkpoints."))
        raise
    return output()


def _view(model: str, result: Evaluation, unfinished: str = "") -> list[RenderableType]:
    view: list[RenderableType] = [
        _scores(model, result),
        f"{result.samples:,} samples, {result.tokens:,} tokens predicted. In brackets: 95 % "
        f"intervals. {_ABOUT_NOISE}",
    ]
    if result.is_worse_than_chance:
        view.append(_WORSE_THAN_CHANCE.format(result.vocabulary))
    for name, scores in result.checkpoints.items():
        view += [f"{_marked(name, scores)}: {note}" for note in scores.notes]
    if unfinished:
        view.append(unfinished)
    checkpoints = result.checkpoints
    if any(scores.layers for scores in checkpoints.values()):
        rows = table("layer", *checkpoints, numbers=tuple(checkpoints), wrapped=())
        for layers in zip(*(scores.layers for scores in checkpoints.values()), strict=True):
            cells = (f"{error.own:.2%} → {error.output:.2%}" for error in layers)
            rows.add_row(layers[0].layer, *cells)
        view += ["", rows, _ABOUT_LAYERS]
    return view


def _scores(model: str, result: Evaluation) -> Table:
    above = result.above_best() if len(result.checkpoints) > 1 else {}
    numbers = ["size", "perplexity", "change", "noise floor", "KL divergence", "top-1 agreement"]
    numbers += ["above the best"] if above else []
    rows = table("model", *numbers, numbers=numbers, wrapped=())
    rows.add_row(model, format_size(result.base.size), f"{result.base.perplexity.value:.4f}")
    for name, scores in result.checkpoints.items():
        cells = [
            _marked(name, scores),
            format_size(scores.size),
            f"{scores.perplexity.value:.4f}",
            format_difference(scores.change),
            f"{scores.change.noise:.1g}",
            scores.kl.text(".5f"),
            scores.agreement.text(".2%"),
        ]
        if above:
            cells.append(format_difference(above[name]) if above[name].value else "the best")
        rows.add_row(*cells)
    return rows


def _marked(name: str, scores: CheckpointScores) -> str:
    return name if scores.reliable else f"{name} (!)"
