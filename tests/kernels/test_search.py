from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DISTRIBUTIONS
from engines import with_engines
from exact import FACTORS, INT4, MXFP4, run
from pairwise import pairwise

from calipers.kernels import resources
from calipers.kernels.reductions import extrema
from calipers.kernels.search import RangeSearch, search_range
from calipers.numerics.layout import flatten_for_calibration


def grouped(weight: torch.Tensor) -> torch.Tensor:
    return flatten_for_calibration(weight, "weight", INT4)


def float64_errors(weight: torch.Tensor, norm: float, **options: object) -> np.ndarray:
    low, high = reference.extrema(weight, "weight", INT4)
    return reference.candidate_errors(weight, "weight", INT4, low, high, FACTORS, norm, **options)


@with_engines(
    "distribution, norm",
    ["gaussian", "student_t", "one_outlier", "positive"],
    [0.5, 1.0, 2.0, 2.4, 3.0, 7.5],
)
def test_finds_the_least_error(distribution: str, norm: float) -> None:
    weight = DISTRIBUTIONS[distribution]((5, 24))
    chosen = run(grouped(weight), norm=norm).flatten()
    errors = float64_errors(weight, norm)
    assert (errors[chosen, np.arange(15)] <= errors.min(0) * (1 + 1e-5)).all()


@with_engines("scale, norm", [1e-30, 1e-18, 1e-9, 1e9, 1e18, 1e30], [2.0, 2.4, 3.0])
def test_the_choice_does_not_depend_on_the_unit(scale: float, norm: float) -> None:
    """Errors of huge or tiny values would overflow or vanish in float32."""
    power = 2.0 ** round(np.log2(scale))
    view = grouped(torch.randn(16, 64))
    assert torch.equal(run(view * power, norm=norm), run(view, norm=norm))


def test_pieces_of_very_different_size() -> None:
    """One huge group must not decide for a tiny one."""
    view = grouped(torch.randn(3, 8))
    mixed = view * torch.tensor([2.0**-90, 1.0, 2.0**90])[None, :, None, None]
    assert torch.equal(run(mixed, norm=2.4), run(view, norm=2.4))


@with_engines("dtype", [torch.float32, torch.bfloat16])
def test_each_of_many_pieces_has_the_range_of_its_own(dtype: torch.dtype) -> None:
    high = torch.arange(1.0, 20_001.0).to(dtype)
    low = -high / 2
    pieces = torch.stack([low, high], -1).reshape(1, -1, 1, 1, 2)
    found = search_range(
        RangeSearch(pieces, low[:, None], high[:, None], INT4, factors=[0.5], norm=2.0)
    )
    assert torch.equal(found[0].flatten(), low / 2)
    assert torch.equal(found[1].flatten(), high / 2)


@with_engines("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_of_two_are_those_of_compressed_tensors(dtype: torch.dtype) -> None:
    """Up to 7 the scale is 1, under which these values are exact: no narrower range is better."""
    x = torch.tensor([6.0, 3.0, 1.5, 0.5] * 8, dtype=dtype).reshape(1, 1, 1, 32)
    low, high = (end.reshape(1) for end in (x.min(), x.max()))
    found = search_range(RangeSearch(x, low, high, MXFP4, factors=[1.0, 0.9], norm=2.0))
    assert [end.item() for end in found] == [0.5, 6.0]


@with_engines("groups", [16, 32, 48, 40])
def test_weights_that_every_row_shares(groups: int) -> None:
    """They are brought into the lanes once, not for every row; odd last rows come on their own."""
    weight, importance = torch.randn(13, 8 * groups), np.random.default_rng(0).random(8 * groups)
    weights = torch.from_numpy(importance).reshape(groups, 8) ** 4
    chosen = run(grouped(weight), weights=weights).flatten()
    errors = float64_errors(weight, 2.0, importance=importance**4)
    best = errors.min(0) * (1 + 1e-5)
    assert (errors[chosen, np.arange(13 * groups)] <= best).all()


def test_weights_count() -> None:
    weight = torch.randn(6, 16)
    importance = np.array([100.0, *[0.01] * 7, *[1.0] * 8])
    weights = torch.from_numpy(importance).reshape(2, 8)
    chosen = run(grouped(weight), weights=weights).flatten()
    errors = float64_errors(weight, 2.0, importance=importance)
    assert (errors[chosen, np.arange(12)] <= errors.min(0) * (1 + 1e-5)).all()
    assert not torch.equal(chosen, run(grouped(weight)).flatten())


@pytest.mark.parametrize("engine", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("shape", "tile", "weighted"),
    pairwise(
        [(1, 5, 3, 8), (6, 4, 8), (9, 1, 24), (1, 1, 100)], [1, 7, 24, 1 << 18], [False, True]
    ),
)
def test_tiles_do_not_show(shape: tuple[int, ...], tile: int, weighted: bool) -> None:
    """Native tiles are of one size; that they do not show is seen by the lengths of pieces."""
    view = torch.randn(shape)
    weights = torch.rand(shape[-2], shape[-1]) if weighted and shape[1] > 1 else None
    whole = run(view, weights=weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "_CACHED", tile)
        assert torch.equal(run(view, weights=weights), whole)


def test_a_later_candidate_must_be_strictly_better() -> None:
    zeros = torch.zeros(1, 3, 8)
    low, high = search_range(
        RangeSearch(
            zeros.unsqueeze(-2),
            zeros[0, :, 0] - 1,
            zeros[0, :, 0] + 1,
            INT4,
            factors=FACTORS,
            norm=2.0,
        )
    )
    assert high.tolist() == [1.0] * 3
    assert low.tolist() == [-1.0] * 3


def test_float64_is_searched_in_float64() -> None:
    view = torch.randn(1, 3, 8, dtype=torch.float64)
    found = extrema(view.unsqueeze(-2))
    chosen = run(view, factors=[0.7, 0.3])
    low, high = search_range(
        RangeSearch(
            view.unsqueeze(-2), found.min_vals, found.max_vals, INT4, factors=[0.7, 0.3], norm=2.0
        )
    )
    factors = torch.tensor([0.7, 0.3], dtype=torch.float64)[chosen]
    assert torch.equal(low, found.min_vals * factors)
    assert torch.equal(high, found.max_vals * factors)


def test_a_range_wider_than_float16_is_searched() -> None:
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="channel")
    weight = torch.randn(4, 64) * 12000
    weight[:, 0], weight[:, 1] = 50000, -50000
    view = flatten_for_calibration(weight, "weight", args)
    factors = [1 - i / 100 for i in range(20)]
    exact = run(view, args, factors=factors)
    half = run(view.half(), args, factors=factors)
    assert (exact - half).abs().max() <= 1
    assert half.min() > 0


def test_no_factors_leave_the_range() -> None:
    view = torch.randn(1, 3, 8)
    found = extrema(view.unsqueeze(-2))
    low, high = search_range(
        RangeSearch(
            view.unsqueeze(-2),
            found.min_vals,
            found.max_vals,
            INT4,
            factors=[],
            norm=2.0,
            expand=2.0,
        )
    )
    assert torch.equal(low, found.min_vals * 2)
    assert torch.equal(high, found.max_vals * 2)
