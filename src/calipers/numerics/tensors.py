"""Small questions about tensors that several packages ask."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from calipers.errors import LayoutError, mask_of_scores


def first_tensor(value: Any) -> Tensor | None:
    """Find the first tensor in the arguments or the result of a call.

    >>> first_tensor(((), {"x": [None, torch.ones(1)]}))
    tensor([1.])
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return None
    return next((found for item in value if (found := first_tensor(item)) is not None), None)


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; tensors made for inference do not tell."""
    return 0 if tensor.is_inference() else tensor._version


def as_float(value: Tensor) -> Tensor:
    """Convert integers and 8-bit floats into a float type that holds all their values."""
    if value.is_floating_point():
        return value.float() if value.dtype.itemsize == 1 else value
    return value.double() if value.dtype.itemsize > 2 else value.float()


def checked_mask(mask: Tensor, value: Tensor, base_name: str, dims: int) -> Tensor:
    """Return a mask of tokens as bool, where the tensor is; refuse one that is none.

    :param value: what is masked, with one token for each position in its first ``dims`` dimensions
    """
    if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
        raise mask_of_scores()
    leading = value.shape[:dims]
    if mask.shape != leading:
        raise LayoutError(
            f"The mask must have one entry per token of '{base_name}', shape {tuple(leading)}",
            got=f"{tuple(mask.shape)}",
        )
    return mask.to(device=value.device, dtype=torch.bool)


def fingerprint(model: torch.nn.Module) -> str:
    """Return a text that differs where the weights of models do, from a few values of each."""
    digest = digest_of(model.named_parameters())
    return f"{type(model).__name__} with the fingerprint {digest[:8]}"


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a text that differs where tensors do, from a few values of each."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // 16)]
        digest.update(f"{name} {tuple(tensor.shape)} {values.dtype}".encode())
        digest.update(bytes(values.cpu().contiguous().view(torch.uint8).tolist()))
    return digest.hexdigest()
