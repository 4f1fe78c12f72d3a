"""Sums of x xᵀ, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calipers.errors import TensorValueError
from calipers.statistics.sums import BlockHessians, PairedHessians, block_width, shrunk


def exact(x: torch.Tensor, width: int) -> torch.Tensor:
    """Blocks of x.T @ x, by slicing."""
    whole = x.double().reshape(-1, x.shape[-1])
    whole = whole.T @ whole
    return torch.stack([whole[i : i + width, i : i + width] for i in range(0, len(whole), width)])


def summed(*parts: torch.Tensor, width: int, mask: torch.Tensor | None = None) -> BlockHessians:
    sums = BlockHessians(width)
    for part in parts:
        sums.update(part, mask)
    return sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 255, 256, 1000])
def test_sums_are_those_of_float64(tokens: int, dtype: torch.dtype) -> None:
    x = (torch.randn(tokens, 24) * torch.linspace(0.01, 5, 24)).to(dtype)
    sums = summed(x, width=8)
    expected = exact(x, 8)
    assert sums._hessian_sum.dtype == torch.float64
    scale = expected.diagonal(dim1=1, dim2=2).sqrt()
    allowed = 1e-6 * scale[:, :, None] * scale[:, None, :]
    assert ((sums._hessian_sum - expected).abs() <= allowed).all()
    assert int(sums._hessian_count) == tokens


def test_small_additions_are_not_lost() -> None:
    """A sum in float32 would stay at 2²⁴."""
    sums = summed(torch.full((1, 2), 2.0**12), width=2)
    for _ in range(100):
        sums.update(torch.ones(1, 2))
    assert sums._hessian_sum.flatten().tolist() == [2.0**24 + 100] * 4


@settings(max_examples=30)
@given(st.integers(0, 12), st.integers(1, 3))
def test_batches_masks_and_merges_add_up(cut: int, width: int) -> None:
    x = torch.randint(-8, 9, (12, 6 * width)).float()  # sums of these are exact
    whole = summed(x.reshape(3, 4, -1), width=width)
    merged = summed(x[:cut], width=width).merge(summed(x[cut:], width=width))
    padded = torch.cat([x, torch.full_like(x, torch.nan)])
    masked = summed(padded, width=width, mask=torch.arange(24) < 12)
    for sums in (merged, masked):
        assert torch.equal(sums._hessian_sum, whole._hessian_sum)
        assert torch.equal(sums._hessian_sum, exact(x, width))
        assert int(sums._hessian_count) == int(whole._hessian_count) == 12


def test_takes_no_part_in_gradients() -> None:
    sums = summed(torch.randn(3, 4, requires_grad=True), width=2)
    assert not sums._hessian_sum.requires_grad


@given(st.integers(1, 40).map(lambda n: 24 * n), st.integers(1, 1200))
def test_blocks_hold_whole_pieces_or_the_other_way_round(columns: int, piece: int) -> None:
    width = block_width(columns, piece)
    assert columns % width == 0
    if columns % piece == 0 and piece <= 512:
        fitting = [w for w in range(1, 513) if columns % w == w % piece == 0]
    else:
        fitting = [w for w in range(1, 513) if columns % w == piece % w == 0]
    assert width == max(fitting)


class TestShrinking:
    def test_of_one_token_little_but_the_diagonal_is_left(self) -> None:
        x = torch.randn(1, 16)
        hessian = exact(x, 16)
        found = shrunk(hessian, 1, damping=0)
        diagonal = hessian.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(found.diagonal(dim1=1, dim2=2), diagonal)
        off = hessian - torch.diag_embed(diagonal)
        torch.testing.assert_close(found - torch.diag_embed(diagonal), off / 17)

    def test_of_many_tokens_everything_is(self) -> None:
        hessian = exact(torch.randn(1000, 4), 4) / 1000
        torch.testing.assert_close(shrunk(hessian, 10**9, damping=0), hessian, rtol=1e-6, atol=1e-9)

    @given(st.integers(1, 40))
    def test_no_direction_is_free(self, tokens: int) -> None:
        """Else a shortlist would take an error there for none; an idle channel is one, too."""
        x = torch.randn(tokens, 12)
        x[:, 3] = 0
        found = shrunk(exact(x, 12) / tokens, tokens)
        least = torch.linalg.eigvalsh(found).min()
        mean = found.diagonal(dim1=1, dim2=2).mean() / 1.01
        assert float(least) >= 0.01 * float(mean) * (1 - 1e-9)


def test_pairs_are_summed_across_and_with_themselves() -> None:
    before, now = torch.randn(2, 300, 6, dtype=torch.float64)
    change, mask = torch.randn(300, 4, dtype=torch.float64), torch.arange(300) % 3 > 0
    sums, alone = PairedHessians(6), PairedHessians(6)
    for these in (slice(100), slice(100, None)):
        alone.update(torch.cat([before, now], -1)[these], mask[these])
        sums.update(torch.cat([before, now, change], -1)[these], mask[these])
    before, now, change = before[mask], now[mask], change[mask]
    for found in (sums, alone):
        assert found.crosses is not None
        torch.testing.assert_close(found.hessians[0], now.T @ now)
        torch.testing.assert_close(found.crosses[0], before.T @ now)
        assert found.num_tokens == 200
    assert alone.residuals is None
    assert sums.residuals is not None
    torch.testing.assert_close(sums.residuals[0], change.T @ now)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_numbers_that_are_none_are_refused_in_each_part_of_a_pair(part: int) -> None:
    pair = torch.ones(4, 3, 3)
    pair[2, part, 1] = torch.nan
    sums = PairedHessians(3)
    with pytest.raises(TensorValueError, match="1 non-finite value"):
        sums.update(pair.flatten(1))
    assert not sums.fields()
