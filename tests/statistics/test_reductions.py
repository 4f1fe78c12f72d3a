"""How values of ranks, and of merged statistics, become one."""

from __future__ import annotations

import pytest
import torch

from calipers.statistics.base import Reduction

DTYPES = [torch.int64, torch.uint8, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", [Reduction.MIN, Reduction.MAX, Reduction.SUM])
def test_who_saw_nothing_changes_nothing(reduction: Reduction, dtype: torch.dtype) -> None:
    values = torch.tensor([7, 0, 5] if dtype == torch.uint8 else [-3, 0, 5], dtype=dtype)
    nothing = reduction.identity(values.shape, dtype, values.device)
    assert torch.equal(reduction.combine(values, nothing), values)
    assert torch.equal(reduction.combine(nothing, values), values)
