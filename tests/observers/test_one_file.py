"""A new observer is one file, and one line in the laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from laws import LAWS, PROMISES, Law, Promise, build

FILE = '''
"""An observer that leaves some room above what it has seen."""

from torch import Tensor

from calipers.observers.base import Observer
from calipers.observers.options import Expand, ObserverOptions
from calipers.observers.base import Observer, in_pieces
from calipers.statistics.ranges import {statistic}


class RoomyOptions(ObserverOptions):
    room: Expand = 1.25


class RoomyObserver(Observer):
    """Takes the extrema of {of}, and some room."""

    remembers = "extrema of {of}"
    when = "never"
    Options = RoomyOptions
    Range = {statistic}

    @in_pieces
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        low, high = self.extrema(observed)
        self.absorb(min_vals=low * self.options.room, max_vals=high * self.options.room)
'''
KINDS = {
    "Extrema": ("all tensors", Promise(merges=True, ignores_order=True)),
    "LastRange": ("the last tensor", Promise(options={"room": 2.0})),
}
WEIGHT = QuantizationArgs(num_bits=4, group_size=4)
INPUT = QuantizationArgs(num_bits=8, symmetric=False)


@pytest.fixture(params=KINDS)
def name(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    file = tmp_path / f"roomy_{request.param}.py"
    of, promise = KINDS[request.param]
    file.write_text(FILE.format(statistic=request.param, of=of))
    monkeypatch.setitem(PROMISES, f"{file}:RoomyObserver", promise)
    return f"{file}:RoomyObserver"


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(("base_name", "args"), [("weight", WEIGHT), ("input", INPUT)])
def test_it_keeps_the_laws(name: str, law: Law, base_name: str, args: QuantizationArgs) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 8) if base_name == "weight" else (2, 3, 8)
    law(name, base_name, args, [torch.randn(shape, generator=generator) for _ in range(4)])


def test_it_does_what_it_says(name: str) -> None:
    observer = build(name, "input", INPUT, [torch.tensor([[-4.0, 8.0]])])
    room = observer.options.room
    assert (observer.min_vals, observer.max_vals) == (-4 * room, 8 * room)
