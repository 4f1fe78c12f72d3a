"""Questions about tensors that several packages ask, and the mask of the tokens that count.

A mask is set around the forward pass of a batch; experts narrow it to the tokens routed to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from calipers.errors import LayoutError, Option, mask_of_scores


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


_current: ContextVar[Tensor | None] = ContextVar("calipers_token_mask", default=None)


def current_mask() -> Tensor | None:
    """Return the mask of what runs now, False for "leave out"; None where every token counts."""
    return _current.get()


@contextmanager
def token_mask(mask: Tensor | None) -> Iterator[None]:
    """Set the (batch, sequence) mask that a model is called with, for its forward pass.

    >>> with token_mask(torch.tensor([[0, 1, 1]])):
    ...     current_mask()
    tensor([[False,  True,  True]])
    """
    if mask is not None:
        if mask.ndim != 2:
            raise LayoutError(
                "A mask of a batch must have shape (batch, sequence)", got=f"{tuple(mask.shape)}"
            )
        if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
            raise mask_of_scores()
        mask = mask != 0
    with _set(mask):
        yield


@contextmanager
def routed_tokens(token_index: Tensor, tokens: int, where: str = "experts") -> Iterator[None]:
    """Narrow the mask to the tokens that an expert sees, of the ``tokens`` that were routed."""
    mask = current_mask()
    if mask is not None:
        if mask.numel() != tokens:
            raise _other_tokens(where, mask, (tokens,))
        mask = mask.reshape(-1).to(token_index.device)[token_index]
    with _set(mask):
        yield


@contextmanager
def _set(mask: Tensor | None) -> Iterator[None]:
    token = _current.set(None if mask is None or bool(mask.all()) else mask)
    try:
        yield
    finally:
        _current.reset(token)


def mask_for(tensor: Tensor, base_name: str, where: str) -> Tensor | None:
    """Return the current mask in the shape that the tokens of a watched tensor have.

    ``None`` where every token counts, and for weights, which have none.

    >>> with token_mask(torch.tensor([[0, 1, 1]])):
    ...     mask_for(torch.zeros(3, 8), "input", "mlp.up_proj")
    tensor([False,  True,  True])
    """
    mask = current_mask()
    if mask is None or base_name == "weight":
        return None
    if base_name in "qkv":  # (batch, heads, sequence, head_dim)
        states = (tensor.shape[0], tensor.shape[2]) if tensor.ndim == 4 else ()
        if states in (mask.shape, (1, mask.numel())):
            return mask.reshape(states)
    else:  # dimensions after those of the tokens share their entries
        leading = tuple(tensor.shape[:-1])
        for tokens in (tuple(mask.shape), (mask.numel(),), (1, mask.numel())):
            if leading[: len(tokens)] == tokens:
                rest = (1,) * (len(leading) - len(tokens))
                return mask.reshape(*tokens, *rest).expand(leading)
        # A dimension of one may stand between those of tokens: (batch, 1, sequence, features).
        if [size for size in leading if size != 1] == [size for size in mask.shape if size != 1]:
            return mask.reshape(leading)
    raise _other_tokens(where, mask, tuple(tensor.shape))


def _other_tokens(where: str, mask: Tensor, shape: tuple[int, ...]) -> LayoutError:
    return LayoutError(
        f"the mask of shape {tuple(mask.shape)} does not say which tokens of the tensor of shape "
        f"{shape} count",
        where=where,
        hint="Use " + Option("batch_size", 1) + " or pack the data, so that there is no padding",
    )


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
