"""Σ x yᵀ over tokens in bfloat16, where the processor multiplies it (AVX512_BF16)."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.native import BACKEND, library
from calipers.kernels.operations import Declined
from calipers.kernels.products import sum_of_products
from calipers.kernels.threads import num_threads


@sum_of_products.register(BACKEND, dtypes=(torch.bfloat16,))
def _natively(left: Tensor, right: Tensor | None = None) -> Tensor | Declined:
    kernels = library()
    if not kernels.can_add_products():
        return Declined("this processor does not multiply bfloat16")
    other = left if right is None else right
    total = left.new_zeros(left.shape[1], other.shape[1], dtype=torch.float64)
    x, y = (
        each.detach() if each.stride(1) == 1 else each.detach().contiguous()
        for each in (left, other)
    )
    symmetric, threads = right is None, num_threads()
    kernels.add_products(left=x, right=y, total=total, symmetric=symmetric, threads=threads)
    return total
