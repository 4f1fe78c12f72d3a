"""A wrong size or stride is an exception, whatever is given to the native module by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import NATIVE_ENGINES, native_only
from torch import Tensor

from calipers.kernels.native import library

pytestmark = [native_only, pytest.mark.parametrize("engine", NATIVE_ENGINES[-1:], indirect=True)]

ONES = (1, 1, 1)


def extrema(values: Tensor, shape: Any, strides: Any, **places: Tensor) -> list[Tensor]:
    count = shape[1] * shape[2] if 0 < shape[1] * shape[2] < 100 else 1
    given: dict[str, Any] = {"low": torch.zeros(count), "high": torch.zeros(count)} | places
    given.setdefault("missing", None)
    library().module.extrema(values, "float32", shape, strides, threads=1, **given)
    return [given["low"], given["high"]]


@pytest.mark.parametrize(
    ("shape", "strides", "what"),
    [
        ((*ONES, 5, 8), (1, 1, 1, 8, 1), "reaches beyond its storage"),
        ((*ONES, 3, 8), (1, 1, 1, 9, 1), "reaches beyond its storage"),
        ((*ONES, 2, 8), (1, 1, 1, -9, 1), "reaches beyond its storage"),
        ((1, 4, 1, 1, 8), (1, 12, 1, 1, 1), "reaches beyond its storage"),
        ((2**62, *ONES, 2), (2**62, 1, 1, 1, 1), "reaches beyond its storage"),
        ((2**62, *ONES, 4), (4, 1, 1, 1, 2**62), "reaches beyond its storage"),
        ((1, 2**33, 2**32, 1, 1), (0, 0, 0, 0, 0), "has more values than can be counted"),
        ((1, 2, 1, 2**62, 4), (0, 0, 0, 0, 0), "has more values than can be counted"),
        ((*ONES, 0, 8), (1, 1, 1, 8, 1), "must not be empty"),
        ((*ONES, -1, 8), (1, 1, 1, 8, 1), "must not be empty"),
    ],
)
def test_extrema_stay_within_the_storage(shape: Any, strides: Any, what: str) -> None:
    values = torch.randn(4, 8)[1:]
    with pytest.raises(ValueError, match=f"values {what}"):
        extrema(values, shape, strides)
    assert extrema(values, (*ONES, 2, 8), (1, 1, 1, 8, 1))[0] == values[:2].min()


def test_what_torch_takes_for_a_view_is_read_and_nothing_else() -> None:
    """The same sizes and strides are refused as by ``as_strided``."""
    chance = random.Random(0)
    storage = torch.randn(60)
    outcomes = set()
    for _ in range(500):
        offset = chance.randrange(60)
        shape = tuple(chance.choice([1, 1, 2, 3, 5]) for _ in range(5))
        strides = tuple(chance.choice([0, 1, 2, 7, 13]) for _ in range(5))
        try:
            view = storage.as_strided(shape, strides, offset)
        except RuntimeError:
            with pytest.raises(ValueError, match="values reaches beyond its storage"):
                extrema(storage[offset:], shape, strides)
            outcomes.add("refused")
            continue
        low, high = extrema(storage[offset:], shape, strides)
        assert torch.equal(low, view.amin((0, 3, 4)).flatten())
        assert torch.equal(high, view.amax((0, 3, 4)).flatten())
        outcomes.add("read")
    assert outcomes == {"refused", "read"}


@pytest.mark.parametrize("place", ["low", "high", "missing"])
def test_extrema_have_room(place: str) -> None:
    few = torch.zeros(8)[5:] if place != "missing" else torch.zeros(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"{place} reaches beyond its storage"):
        extrema(torch.randn(4, 8), (1, 4, 1, 1, 8), (1, 8, 1, 1, 1), **{place: few})


PIECES = torch.randn(1, 3, 1, 1, 8)
THREE, FLAGS = torch.ones(3), torch.zeros(2, dtype=torch.uint8)


def _search(**changes: Any) -> None:
    kernels = library()
    given = {"low": -THREE, "high": THREE, "factors": torch.ones(2)}
    known = {"best": torch.zeros(3, dtype=torch.int32), "improved": FLAGS.clone()}
    known |= {"done": torch.zeros(3, dtype=torch.int32), "least": torch.zeros(3).double()}
    kernels.search(
        values=PIECES,
        weights=changes.get("weights"),
        ranges=kernels.RangeFactors(**{key: changes.get(key, given[key]) for key in given}),
        numbers=kernels.Numbers("int", -8, 7),
        norm=2.0,
        scales=kernels.ScaleChoice(source="plain", shifted=False),
        progress=kernels.Progress(
            patience=1, **{key: changes.get(key, known[key]) for key in known}
        ),
        threads=1,
    )


def _quantize(**changes: Any) -> None:
    kernels = library()
    given = {"scales": THREE, "zero_points": None, "weights": None}
    given["errors"] = torch.zeros(1, 3, dtype=torch.float64)
    numbers = kernels.Numbers("int", -8, 7)
    kernels.quantize(values=PIECES, **(given | changes), numbers=numbers, norm=2.0, threads=1)


def _encode(**changes: Any) -> None:
    kernels = library()
    scales, zeros = changes.pop("scales", torch.ones(6)), changes.pop("zeros", torch.zeros(1))
    given = {"values": torch.ones(1, 1, 1, 3, 8), "output": None, "packed": None}
    given["errors"] = torch.zeros(8, dtype=torch.float64)
    kernels.encode(
        **(given | changes),
        blocks=kernels.Blocks(scales=scales, zeros=zeros, height=1, width=4),
        working="float32",
        numbers=kernels.Numbers("int", -8, 7),
        offset=8.0,
        bits=4,
        threads=1,
    )


def _count(**changes: Any) -> None:
    counts = torch.zeros(3, 65536, dtype=torch.int64)
    library().count_values(**({"values": PIECES, "counts": counts} | changes), threads=1)


def _feed_back(**changes: Any) -> None:
    kernels = library()
    groups = changes.pop("groups", torch.zeros(4, dtype=torch.int64))
    rounder = kernels.Rounder(
        scales=torch.ones(1, 1), zeros=None, groups=groups, numbers=kernels.Numbers("int", -8, 7)
    )
    matrices = ("target", "result", "errors")
    given = {name: torch.zeros(3, 4) for name in matrices} | {"adjusted": torch.zeros(3, 2)}
    given |= {"factor": torch.eye(4), "begin": 2} | changes
    kernels.feed_back(rounder=rounder, threads=1, **given)


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        (_search, {"low": THREE[:2].clone()}),
        (_search, {"weights": torch.ones(1, 3, 1, 1, 7)}),
        (_search, {"improved": FLAGS[:1].clone()}),
        (_search, {"best": torch.zeros(2, dtype=torch.int32)}),
        (_search, {"done": torch.tensor([0, 0, 3], dtype=torch.int32)}),
        (_search, {"done": torch.tensor([0, -1, 0], dtype=torch.int32)}),
        (_quantize, {"scales": torch.ones(2)}),
        (_quantize, {"zero_points": torch.ones(2)}),
        (_quantize, {"errors": torch.zeros(1, 2, dtype=torch.float64)}),
        (_encode, {"scales": torch.ones(5)}),
        (_encode, {"zeros": torch.zeros(5)}),
        (_encode, {"packed": torch.zeros(3 * 3, dtype=torch.uint8)}),
        (_encode, {"output": torch.zeros(23)}),
        (_encode, {"errors": torch.zeros(7, dtype=torch.float64)}),
        (_encode, {"values": torch.ones(1, 2, 1, 3, 8)}),
        (_count, {"counts": torch.zeros(2, 65536, dtype=torch.int64)}),
        (_count, {"values": PIECES[:, :0]}),
        (_feed_back, {"begin": 3}),
        (_feed_back, {"begin": -1}),
        (_feed_back, {"factor": torch.eye(3)}),
        (_feed_back, {"result": torch.zeros(3, 3)}),
        (_feed_back, {"groups": torch.tensor([0, 0, 0, 1])}),
        (_feed_back, {"adjusted": torch.zeros(3, 0)}),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[..., None], changes: dict[str, Any]) -> None:
    call()
    with pytest.raises(ValueError, match=r"size|shape|empty|count|reach|number|matrix|small"):
        call(**changes)
