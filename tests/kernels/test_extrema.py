from __future__ import annotations

import pytest
import torch
from data import DISTRIBUTIONS, DTYPES
from engines import with_engines
from geometries import in_any_memory, pieces

from calipers.kernels.reductions import extrema

NAN, INF = float("nan"), float("inf")


@with_engines(
    "shape, name, dtype",
    [(1, 1, 1), (3, 2, 5), (1, 4, 7, 3), (6, 9)],
    list(DISTRIBUTIONS),
    [*DTYPES, torch.float64],
)
def test_against_loops(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    view = DISTRIBUTIONS[name](shape).to(dtype)
    found = extrema(view.unsqueeze(-2))
    flat = view.movedim(0, -2).reshape(*shape[1:-1], -1)
    assert torch.equal(found.min_vals, flat.min(-1).values)
    assert torch.equal(found.max_vals, flat.max(-1).values)
    assert found.nonfinite == 0


@in_any_memory
def test_any_memory(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    found = extrema(pieces(memory, shape, values))
    assert torch.equal(found.min_vals, values.amin((0, -2, -1)))
    assert torch.equal(found.max_vals, values.amax((0, -2, -1)))


@in_any_memory
def test_nonfinite_anywhere(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    strange = torch.rand(shape) < 0.2
    values[strange] = torch.tensor([NAN, INF, -INF, -NAN], dtype=dtype).repeat(values.numel())[
        : int(strange.sum())
    ]
    values[0, 0, 0] = NAN  # if it has all observations, a piece without any finite value
    found = extrema(pieces(memory, shape, values))
    finite = torch.isfinite(values)
    missing = ~finite.any(-1).any(-1).any(0)
    low = values.masked_fill(~finite, INF).amin((0, -2, -1)).masked_fill(missing, 0)
    high = values.masked_fill(~finite, -INF).amax((0, -2, -1)).masked_fill(missing, 0)
    assert torch.equal(found.min_vals, low)
    assert torch.equal(found.max_vals, high)
    assert found.nonfinite == int((~finite).sum())
    assert found.missing is not None
    assert torch.equal(found.missing, missing)


@with_engines(
    "position, value, dtype",
    [0, 15, 16, 31, 4095, 4096, 70_000, 199_999],
    [NAN, INF, -INF],
    DTYPES,
)
def test_one_strange_value_is_never_missed(position: int, value: float, dtype: torch.dtype) -> None:
    values = torch.ones(1, 1, 1, 200_000, dtype=dtype)
    values[..., position] = value
    found = extrema(values)
    assert (found.nonfinite, found.min_vals.item(), found.max_vals.item()) == (1, 1.0, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_a_dtype(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    tiny = limits.smallest_normal * limits.eps  # the smallest there is
    values = torch.tensor([0.0, -0.0, tiny, -tiny, limits.max, limits.min], dtype=dtype)
    found = extrema(values.reshape(6, 1, 1, 1))
    assert (found.min_vals.item(), found.max_vals.item()) == (limits.min, limits.max)
    found = extrema(values.reshape(1, 3, 1, 2))
    assert found.min_vals.tolist() == [0.0, -tiny, limits.min]
    assert found.max_vals.tolist() == [0.0, tiny, limits.max]


def test_a_view_that_turns_the_sign() -> None:
    complex_values = torch.view_as_complex(torch.rand(8, 2) + 1)
    view = complex_values.conj().imag.reshape(1, 2, 1, 4)
    assert view.is_neg()
    found = extrema(view)
    assert torch.equal(found.min_vals, view.resolve_neg().amin((0, -2, -1)))


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    view = torch.tensor(
        [[[1.0, NAN], [INF, -INF], [2.0, -INF]], [[5.0, 3.0], [NAN, NAN], [9.0, 4.0]]]
    )
    found = extrema(view.unsqueeze(-2))
    assert found.min_vals.tolist() == [1.0, 0.0, 2.0]
    assert found.max_vals.tolist() == [5.0, 0.0, 9.0]
    assert found.nonfinite == 6
