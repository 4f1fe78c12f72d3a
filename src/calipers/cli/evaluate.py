"""``calipers evaluate``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.cli.command import CommandOutput, show, tell
from calipers.cli.formatting import format_difference, format_optional_size
from calipers.cli.options import Data, Model
from calipers.cli.sources import DATA_KINDS, data_source, model_source, packed
from calipers.cli.tables import add_row, table
from calipers.errors import ConfigurationError, Mistakes
from calipers.options import ComputeOptions, DataOptions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from calipers.evaluation import CheckpointScores, Difference, Evaluation, Scores

Checkpoints = Annotated[
    list[str] | None,
    typer.Argument(metavar="OUT", help="Checkpoints that were made from it, any number."),
]
Layers = Annotated[
    bool,
    typer.Option("--layers/--no-layers", help="Measure the error of each layer; takes longer."),
]


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
    texts = mistakes.check(_texts, data)
    source = mistakes.check(model_source, model)
    quantized = [mistakes.check(model_source, each) for each in checkpoints or ()]
    mistakes.check(check_data_options, taken)
    mistakes.check(check_compute_options, compute)
    mistakes.tell()
    from calipers.evaluation import evaluate as compare

    done = _Done(model, len(quantized))
    with done.shown_on_failure():
        compare(
            source,
            quantized,
            texts,
            layers=layers,
            each=done.add,
            data=taken,
            compute=compute,
        )
    return done.output(complete=True)


def _texts(data: str | None) -> Any:
    if data is None:
        problem = "The command has no --data to evaluate on"
        raise ConfigurationError(problem, hint=f"Give {DATA_KINDS}.")
    return data_source(data, "evaluation")


class _Done:
    """What is done of an evaluation; each model is told of when it is."""

    def __init__(self, model: str, checkpoints: int) -> None:
        self._model, self._checkpoints = model, checkpoints
        self.found: Evaluation | None = None

    def add(self, found: Evaluation) -> None:
        """Tell of the model that was judged last."""
        self.found = found
        name: str = Path(self._model).name
        scores: Scores = found.base
        if found.checkpoints:
            name, scores = list(found.checkpoints.items())[-1]
        told = _in_words(scores)
        if scores is found.base and found.is_worse_than_chance:
            told += ", worse than chance"
        tell({"evaluated": {"name": name, **scores.as_dict()}}, f"{name}: {told}")

    @contextmanager
    def shown_on_failure(self) -> Iterator[None]:
        """Print what was found before something failed."""
        try:
            yield
        except BaseException:
            if self.found is not None:
                show(self.output(complete=False))
            raise

    def output(self, *, complete: bool) -> CommandOutput:
        """Return what was found."""
        assert self.found is not None
        data: dict[str, Any] = {"model": self._model, "complete": complete, **self.found.as_dict()}
        done = f"Not complete: {len(self.found.checkpoints)} of {self._checkpoints} checkpoints."
        view = _view(Path(self._model).name, self.found, "" if complete else done)
        return CommandOutput(data, view)


def _in_words(scores: Scores) -> str:
    change = getattr(scores, "change", None)
    against = "" if change is None else f", change {format_difference(change)}"
    return f"perplexity {scores.perplexity.value:.4f}{against}"


def _view(model: str, found: Evaluation, unfinished: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    about = (
        f"{found.samples:,} samples, {found.tokens:,} tokens predicted. In brackets: 95 % "
        f"intervals. {_ABOUT_NOISE}"
    )
    parts: list[RenderableType] = [_scores(model, found), about]
    if found.is_worse_than_chance:
        parts.append(_WORSE_THAN_CHANCE.format(found.vocabulary))
    for name, scores in found.checkpoints.items():
        parts += [Text(f"{_marked(name, scores)}: {note}") for note in scores.notes]
    parts += [unfinished] if unfinished else []
    if any(scores.layers for scores in found.checkpoints.values()):
        parts += ["", _layers(found), _ABOUT_LAYERS]
    return Group(*parts)


def _scores(model: str, found: Evaluation) -> Table:
    above = found.above_best() if len(found.checkpoints) > 1 else {}
    numbers = ["size", "perplexity", "change", "noise floor", "KL divergence", "top-1 agreement"]
    numbers += ["above the best"] if above else []
    made = table("model", *numbers, numbers=numbers, wrapped=())
    base = found.base
    add_row(made, model, format_optional_size(base.size), f"{base.perplexity.value:.4f}")
    for name, scores in found.checkpoints.items():
        add_row(
            made,
            _marked(name, scores),
            format_optional_size(scores.size),
            f"{scores.perplexity.value:.4f}",
            format_difference(scores.change),
            f"{scores.change.noise:.1g}",
            scores.kl.text(".5f"),
            scores.agreement.text(".2%"),
            *([_to_best(above[name])] if above else []),
        )
    return made


def _marked(name: str, scores: CheckpointScores) -> str:
    return name if scores.reliable else f"{name} (!)"


def _to_best(above: Difference) -> str:
    return format_difference(above) if above.value else "the best"


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


def _layers(found: Evaluation) -> Table:
    compared = found.checkpoints
    made = table("layer", *compared, numbers=tuple(compared), wrapped=())
    for rows in zip(*(scores.layers for scores in compared.values()), strict=True):
        add_row(made, rows[0].layer, *(f"{row.own:.2%} → {row.output:.2%}" for row in rows))
    return made
