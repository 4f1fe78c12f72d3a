"""What observing all inputs adds to a forward pass of stories15M."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from contenders import OURS, PEER, Contender
from racing import Prepare, calling, race, seconds_of_others
from rich.console import Console
from stories import decoder_linears, let_pass, load_stories, visited_inputs
from tables import Column, Measured, Row, Section, milliseconds, show
from torch import Tensor

SECTION = "overhead"
SEQUENCES, LENGTH, BATCHES = 16, 256, 4
CONTENDERS = (
    *(Contender(OURS, name) for name in ("static_minmax", "value_counts", "histogram_mse")),
    *(Contender(PEER, name) for name in ("minmax", "mse")),
)


def measure_overhead(console: Console, model: Any, quick: bool) -> list[Row]:
    """Time the decoder bare and under each observer, in turns, and print what they add."""
    batches = fixed_batches()
    present = {lane(c): c for c in CONTENDERS if c.is_registered}
    lanes: dict[str, list[Prepare]] = {
        "bare": [calling(run, model, batches, let_pass)],
        **{name: [observing(c, model, batches)] for name, c in present.items()},
    }
    started, used = time.perf_counter(), seconds_of_others()
    seconds = race(lanes, quick)
    used = max(0.0, seconds_of_others() - used) / (time.perf_counter() - started)
    bare = seconds.pop("bare")
    rows = [
        {
            "library": present[name].library,
            "observer": present[name].observer,
            "bare_seconds": bare,
            "seconds": found,
            "added_percent": 100 * (found - bare) / bare,
        }
        for name, found in seconds.items()
    ]
    show(console, TABLE, Measured(rows, used))
    return rows


def lane(contender: Contender) -> str:
    """Name a lane so that the race spares the peer."""
    return f"{'ours' if contender.library == OURS else 'peer'} {contender.observer}"


def fixed_batches() -> list[Tensor]:
    """Return stories one after the other, cut into sequences of one length."""
    tokens = torch.cat(load_stories("calibration"), dim=-1)
    return list(tokens[0, : SEQUENCES * LENGTH * BATCHES].view(BATCHES, SEQUENCES, LENGTH))


def observing(contender: Contender, model: Any, batches: list[Tensor]) -> Prepare:
    """Run the model with new observers of all inputs."""

    def prepare() -> Callable[[], object]:
        args = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
        names = decoder_linears(model)
        observers = {f"{name}.input": contender.build("input", args) for name in names}

        def visit(site: str, tensor: Tensor) -> Tensor:
            observers[site](tensor)
            return tensor

        return partial(run, model, batches, visit)

    return prepare


@torch.no_grad()
def run(model: Any, batches: list[Tensor], visit: Callable[[str, Tensor], Tensor]) -> None:
    """Run the decoder, visiting the inputs of all linears."""
    with visited_inputs(model, visit):
        for batch in batches:
            model.model(batch, use_cache=False)


TABLE = Section(
    lambda _: [],
    f"Observing all inputs of the decoder, {SEQUENCES * LENGTH * BATCHES} tokens in float32",
    (
        Column("library", "library"),
        Column("observer", "observer"),
        Column("bare", "bare_seconds", milliseconds, "fastest pass, without lm_head."),
        Column("observed", "seconds", milliseconds, "fastest pass with all inputs observed."),
        Column("added %", "added_percent", "{:.1f}".format, "of the bare pass."),
    ),
)
