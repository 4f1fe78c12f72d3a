"""``calipers evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.command import Report, shows_progress
from calipers.cli.options import (
    BatchSize,
    Data,
    Device,
    Dtype,
    Model,
    Packing,
    Samples,
    Seed,
    SeqLen,
    TextColumn,
    Tokenizer,
    TrustRemoteCode,
)
from calipers.cli.sources import DATA_KINDS, data_source, model_source, packing_for
from calipers.cli.tables import add_row, table
from calipers.cli.words import interval, optional_size
from calipers.errors import OptionsError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from calipers.evaluation import Estimate, Evaluation

Checkpoints = Annotated[
    list[str] | None,
    typer.Argument(metavar="OUT", help="Checkpoints that were made from it, any number."),
]
Skip = Annotated[
    int,
    typer.Option(
        "--skip",
        metavar="N",
        min=0,
        help="Pass over the first N samples: those that calibration took from the same data.",
    ),
]
Layers = Annotated[
    bool,
    typer.Option("--layers/--no-layers", help="Measure the error of each layer; takes longer."),
]


def evaluate(
    model: Model,
    checkpoints: Checkpoints = None,
    data: Data = None,
    samples: Samples = 512,
    skip: Skip = 0,
    seq_len: SeqLen = None,
    batch_size: BatchSize = 1,
    packing: Packing = None,
    text_column: TextColumn = None,
    tokenizer: Tokenizer = None,
    layers: Layers = True,
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> Report:
    """Compare checkpoints with the model they were made from.

    Tells perplexity, KL divergence and top-1 agreement, with intervals of 95 % that are paired on
    the same text, and the error of each layer.

    Example: calipers evaluate demo demo-w4a16 --data demo
    """
    if data is None:
        raise OptionsError("The command has no --data to evaluate on", DATA_KINDS)
    source, texts = model_source(model), data_source(data, "evaluation")
    quantized = [model_source(each) for each in checkpoints or ()]
    from calipers.evaluation import evaluate as compare

    found = compare(
        source,
        quantized,
        texts,
        tokenizer=tokenizer,
        num_samples=samples,
        max_seq_length=seq_len,
        batch_size=batch_size,
        packing=packing_for(data, packing),
        seed=seed,
        skip=skip,
        text_column=text_column,
        device=device,
        dtype=dtype,  # type: ignore[arg-type]  # it checks
        layers=layers,
        trust_remote_code=trust_remote_code,
        progress=shows_progress(),
    )
    return Report({"model": model, **found.as_dict()}, _view(Path(model).name, found))


def _view(model: str, found: Evaluation) -> RenderableType:
    from rich.console import Group

    about = (
        f"{found.samples:,} samples, {found.tokens:,} tokens predicted. In brackets: 95 % "
        "intervals. A change or a distance whose interval holds 0 may be noise."
    )
    parts: list[RenderableType] = [_scores(model, found), about]
    if any(scores.layers for scores in found.checkpoints.values()):
        parts += ["", _layers(found), _ABOUT_LAYERS]
    return Group(*parts)


def _scores(model: str, found: Evaluation) -> Table:
    above = found.above_best() if len(found.checkpoints) > 1 else {}
    numbers = ["size", "perplexity", "change", "KL divergence", "top-1 agreement"]
    numbers += ["above the best"] if above else []
    made = table("model", *numbers, numbers=numbers, wrapped=())
    base = found.base
    add_row(made, model, optional_size(base.size), f"{base.perplexity.value:.4f}")
    for name, scores in found.checkpoints.items():
        add_row(
            made,
            name,
            optional_size(scores.size),
            f"{scores.perplexity.value:.4f}",
            interval(scores.change, "+.4f"),
            interval(scores.kl, ".5f"),
            interval(scores.agreement, ".2%"),
            *([_to_best(above[name])] if above else []),
        )
    return made


def _to_best(above: Estimate) -> str:
    return interval(above, "+.4f") if above.value else "the best"


_ABOUT_LAYERS = (
    "‖h′ − h‖ / ‖h‖ at the output of each layer: what it adds by itself → what has come together."
)


def _layers(found: Evaluation) -> Table:
    compared = found.checkpoints
    made = table("layer", *compared, numbers=tuple(compared), wrapped=())
    for rows in zip(*(scores.layers for scores in compared.values()), strict=True):
        add_row(made, rows[0].layer, *(f"{row.own:.2%} → {row.output:.2%}" for row in rows))
    return made
