"""What a page shows, made up: as much as of a real model, and with names that are no names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from families import VOCABULARY

from calipers.evaluation import LayerError
from calipers.judging.costs import ModuleCosts
from calipers.linting import Finding
from calipers.measurements import MeasurementsInfo
from calipers.measurements.summary import Magnitudes
from calipers.reporting.content import (
    CheckpointFacts,
    Content,
    InputDetail,
    ObserverRanges,
    WeightDetail,
    WeightLimits,
)
from calipers.reporting.inputs import Channel, ChannelRanges, ChosenRange, Shares
from calipers.reporting.modules import ModuleFacts, judged
from calipers.reporting.outside import (
    Evaluated,
    EvaluatedModel,
    Interval,
    Prediction,
    Sufficiency,
)

IDS = torch.randint(VOCABULARY, (32, 128), generator=torch.Generator().manual_seed(3))
KINDS = (
    *(f"self_attn.{kind}_proj" for kind in "qkvo"),
    *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down")),
)
EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "<b>bold</b>{{ 7 * 7 }}%{x}</title>\u2028&amp;",
)


class Made(NamedTuple):
    """A model, what was measured of it, and checkpoints of it."""

    model: Path
    measurements: Path
    plain: Path
    static: Path


def content(layers: int = 4, evil: bool = True) -> Content:
    """Return what a model of so many layers, with two checkpoints, would have on its page."""
    names = [f"model.layers.{layer}.{kind}" for layer in range(layers) for kind in KINDS]
    names += [f"model.layers.{index}.{name}" for index, name in enumerate(EVIL) if evil]
    names += EVIL if evil else ()
    word = EVIL[0] if evil else "checkpoint"
    checkpoints = tuple(_checkpoint(f"{word} {index}", names, index) for index in range(2))
    return Content(
        model=EVIL[0] if evil else "model",
        architecture=EVIL[1] if evil else "LlamaForCausalLM",
        checkpoints=checkpoints,
        info=MeasurementsInfo("LlamaForCausalLM", "f" * 64, ("0" * 16,) * 32, 65_536),
        source_size=16_060_522_496,
        parameters=8_030_261_248,
        inputs=tuple(_input((name,)) for name in names),
        weights={name: WeightDetail(4096, 4096, _histogram()) for name in names},
        evaluation=_evaluated([each.name for each in checkpoints], layers),
        predictions=tuple(Prediction(name, word, 0.1) for name in names),
        sufficiency=(Sufficiency(f"{names[0]}.input", False, word),),
        missing=(word,),
    )


def error_of(index: int, checkpoint: int) -> float:
    """The output error of the so many-th module: all differ, and one stands out."""
    return 0.5 if (index, checkpoint) == (9, 0) else 0.02 * (1.5 + math.sin(index + checkpoint))


def _checkpoint(name: str, names: list[str], number: int) -> CheckpointFacts:
    rows = [
        ModuleFacts(
            module, "int4 by group 128", 4.125, 8_650_752, 0.1, ModuleCosts(error_of(at, number))
        )
        for at, module in enumerate(names)
    ]
    return CheckpointFacts(
        name,
        {"int4 by group 128": len(names)},
        5_700_000_000,
        4.125,
        judged(rows, {}, {}),
        {module: _range("this checkpoint") for module in names},
        {module: WeightLimits(0.01, 0.05, 0.4, 131_072) for module in names},
        (Finding("error", name, names[-1], name, name),),
        (name,),
    )


def _range(observer: str) -> ChosenRange:
    return ChosenRange(observer, -20.3, 20.1, 0.16, Shares(0.001, 0.6, 0.2))


def _histogram() -> Magnitudes:
    counts = tuple(1 + 7919 * index % 100_003 for index in range(90))
    return Magnitudes(rms=0.02, largest=0.5, zeros=5, exponent=-60, counts=counts)


def _input(readers: tuple[str, ...]) -> InputDetail:
    ends = tuple(1.2345 + index / 7 for index in range(256))
    channels = ChannelRanges(
        4096, 16, tuple(-end for end in ends), ends, 1.0, 1, (Channel(77, -3.0, 80.5, 80.5),)
    )
    ranges = tuple(_range(name) for name in ("static_minmax", "histogram_mse", "percentile"))
    by_format = (ObserverRanges("int8 by tensor", ranges),)
    return InputDetail(readers, 65_536, True, _histogram(), channels, by_format)


def _evaluated(names: list[str], layers: int) -> Evaluated:
    errors = tuple(LayerError(f"model.layers.{n}", 0.1, 0.1 + n / 100) for n in range(layers))
    interval = Interval(6.5, 6.25, 6.75)
    models = (
        EvaluatedModel(name, interval, interval, interval, interval, layers=errors, notes=(name,))
        for name in names
    )
    return Evaluated(32, 65_536, (EvaluatedModel("float", interval), *models))
