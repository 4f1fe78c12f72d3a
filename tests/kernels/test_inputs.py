"""No operation writes to what it is given, and how that lies in memory changes no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs
from engines import backends_in_use
from pairwise import pairwise
from torch import Tensor

from calipers.kernels.hessian import Rounding, choose_candidates, descend, feed_back
from calipers.kernels.operations import operations
from calipers.kernels.optimum import ScaleSearch, best_scales
from calipers.kernels.reductions import (
    BINS,
    count_values,
    distinct_values,
    extrema,
    sum_of_products,
    sum_of_squares,
    summarize_channels,
)
from calipers.kernels.rounding import Quantization, pack_weight, quantization_errors
from calipers.kernels.search import RangeSearch, search_range
from calipers.numerics.formats import Format, windows_of

INT4 = QuantizationArgs(num_bits=4, strategy="channel", symmetric=False)
FMT = Format.of(INT4)
SYMMETRIC = Format.of(QuantizationArgs(num_bits=4))
INT2 = Format.of(QuantizationArgs(num_bits=2, symmetric=False))
SHAPES = [(3, 8), (1, 8), (3, 1), (1, 1)]
STORABLE = torch.arange(1.0, 65.0) / 64


def as_pieces(matrix: Tensor) -> Tensor:
    """A piece for each row: (observations, *qparam_shape, rows, columns)."""
    return matrix[None, :, None, None]


class Given(NamedTuple):
    """What operations are given: matrices, but for the groups, of which there is one per column."""

    values: Tensor
    target: Tensor
    hessian: Tensor
    scales: Tensor
    zeros: Tensor
    low: Tensor
    high: Tensor
    weights: Tensor
    mask: Tensor
    groups: Tensor

    @classmethod
    def of(cls, shape: tuple[int, int], dtype: torch.dtype) -> Given:
        rows, columns = shape
        generator = torch.Generator().manual_seed(rows + columns)
        values = torch.randn(shape, generator=generator).to(dtype)
        inputs = torch.randn(2 * columns, columns, generator=generator)
        largest = values.abs().amax(1, keepdim=True)
        return cls(
            values,
            torch.randn(shape, generator=generator).to(dtype),
            inputs.T @ inputs / len(inputs),
            (largest / 5).float(),
            torch.randint(-2, 3, (rows, 1), generator=generator).float(),
            -largest,
            largest,
            torch.rand(1, columns, generator=generator) + 0.1,
            torch.arange(rows) % 3 != 1,
            torch.zeros(columns, dtype=torch.int64),
        )

    def laid_out(self, memory: Callable[[Tensor], Tensor]) -> Given:
        return Given(*map(memory, self))


# Each of these returns what an operation does, and what it fills in place by its description.


def _search(x: Given) -> Any:
    factors = [1 - i / 10 for i in range(9)]
    ends = (x.low, x.high)
    return search_range(
        RangeSearch(as_pieces(x.values), *ends, INT4, factors=factors, norm=2.4, weights=x.weights)
    )


def _optimum(x: Given, storable: Tensor | None, fmt: Format = SYMMETRIC) -> Any:
    pieces, windows = as_pieces(x.values), windows_of(fmt, fmt.symmetric)
    ends = (x.low, x.high)
    return best_scales(
        ScaleSearch(
            pieces, *ends, fmt, windows=windows, storable=storable, weights=x.weights, keep=2
        )
    )


def _count(x: Given) -> Any:
    counts = torch.ones(len(x.values), 1, BINS, dtype=torch.int64)
    return count_values(as_pieces(x.values)), count_values(as_pieces(x.values), into=counts)


def _summarize(x: Given) -> Any:
    counts = torch.ones(1, BINS, dtype=torch.int64)
    found = summarize_channels(x.values, x.mask, counts=counts), summarize_channels(x.values)
    return [*found, counts]


def _rounding(x: Given) -> Any:
    return as_pieces(x.values), x.scales, x.zeros, INT4


def _feed_back(x: Given) -> Any:
    return feed_back(x.target, x.hessian, Rounding(x.scales, x.zeros, x.groups, FMT), block=3)


def _descend(x: Given) -> Any:
    rounding = Rounding(x.scales, x.zeros, x.groups, FMT)
    values, target = (each.float().resolve_neg().contiguous() for each in (x.values, x.target))
    pulls = (values - target) @ x.hessian.resolve_neg().contiguous()
    known = torch._neg_view(-pulls.T).T
    found = [
        descend(x.values, x.target, x.hessian, rounding, 2, block=3, pulls=given)
        for given in (None, pulls, known)
    ]
    return *found, pulls, known


def _choose(x: Given) -> Any:
    width = min(4, x.values.shape[1])
    pieces = x.values.unflatten(1, (-1, width))[None, :, :, None]
    shape = (*pieces.shape[1:3], -1)
    scales = torch.cat([x.scales, x.scales * 0.9], 1)[:, None].expand(*shape)
    zeros = x.zeros[:, None].expand_as(scales)
    return choose_candidates(pieces, scales, zeros, x.hessian[None], INT4)


def _pack(x: Given) -> Any:
    form = CompressionFormat.pack_quantized
    scales = x.scales.to(x.values.dtype)
    zeros = x.zeros.to(torch.int8)
    return list(pack_weight(x.values, scales, zeros, None, INT4, form, with_values=True))


CALLS: dict[str, Callable[[Given], Any]] = {
    "extrema": lambda x: extrema(as_pieces(x.values)),
    "best_range": _search,
    "try_scales": lambda x: _optimum(x, STORABLE),
    "try_scales polished": lambda x: _optimum(x, None, INT2),
    "sweep_scales": lambda x: _optimum(x, None),
    "sum_of_squares": lambda x: (sum_of_squares(x.values), sum_of_squares(x.values, x.mask)),
    "sum_of_products": lambda x: (
        sum_of_products(x.values),
        sum_of_products(x.values, x.target),
        sum_of_products(x.values.bfloat16(), x.target.bfloat16()),
    ),
    "add_counts": _count,
    "add_counts distinct": lambda x: distinct_values(as_pieces(x.values.bfloat16())),
    "summarize_channels": _summarize,
    "quantization_errors": lambda x: quantization_errors(
        Quantization(*_rounding(x), 2.4, x.weights)
    ),
    "feed_back_block": _feed_back,
    "descend_in_place": _descend,
    "choose_in_blocks": _choose,
    "pack": _pack,
}
"""What reaches each operation, by its name and, behind a space, by how."""


def _inside(plain: Tensor) -> Tensor:
    """Amid a larger tensor, whose other values would show."""
    memory = torch.full([2 * size + 3 for size in plain.shape], 99).to(plain.dtype)
    view = memory[tuple(slice(1, 2 * size + 1, 2) for size in plain.shape)]
    return view.copy_(plain)


def _negated(plain: Tensor) -> Tensor:
    """A view whose sign is to be turned, such as ``torch.imag`` of a conjugate."""
    return torch._neg_view(-plain) if plain.is_floating_point() else plain


MEMORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda plain: plain,
    "inside": _inside,
    "transposed": lambda plain: plain.T.contiguous().T if plain.dim() == 2 else plain,
    "rows expanded": lambda plain: plain[:1].expand_as(plain) if plain.dim() == 2 else plain,
    "columns expanded": lambda plain: plain[..., :1].expand_as(plain),
    "negated": _negated,
    "negated and inside": lambda plain: _negated(_inside(plain)),
}


BACKENDS = sorted({name for each in operations().values() for name in each.backends})
PLACES = [
    (call, backend, memory)
    for call, backend, memory in pairwise([*CALLS], BACKENDS, [*MEMORIES])
    if backend in operations()[call.split()[0]].backends
]
"""Every call on every backend that has its operation, in kinds of memory that take turns."""


def bits_of(given: Given) -> list[bytes]:
    """All memory that tensors are views of."""
    return [bytes(each.untyped_storage()) for each in given]


def tensors_in(found: Any) -> Iterator[Tensor]:
    for each in found if isinstance(found, (tuple, list)) else [found]:
        if isinstance(each, (tuple, list)):
            yield from tensors_in(each)
        elif each is not None:
            yield torch.as_tensor(each)


@pytest.fixture
def engine() -> None:
    """Backends are chosen by the tests themselves."""


@pytest.mark.parametrize(("call", "backend", "memory"), PLACES)
def test_inputs_stay_as_they_are_wherever_they_lie(call: str, backend: str, memory: str) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            given = Given.of(shape, dtype).laid_out(MEMORIES[memory])
            plain = Given(*(each.resolve_neg().clone().contiguous() for each in given))
            with backends_in_use(backend):
                expected = list(tensors_in(CALLS[call](plain)))
                before = bits_of(given)
                found = list(tensors_in(CALLS[call](given)))
            assert bits_of(given) == before, (shape, dtype)
            for ours, theirs in zip(found, expected, strict=True):
                # Sums may run in another order.
                rtol = 1e-12 if ours.dtype == torch.float64 else 0
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_reaches_its_operation(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation, reached = operations()[call.split()[0]], []

    def reference(*args: Any, **kwargs: Any) -> Any:
        reached.append(call)
        return given(*args, **kwargs)

    given = operation.reference
    monkeypatch.setattr(operation, "reference", reference)
    with backends_in_use("torch"):
        CALLS[call](Given.of((3, 8), torch.float32))
    assert reached


def test_no_operation_is_left_out() -> None:
    assert {name.split()[0] for name in CALLS} == set(operations())
