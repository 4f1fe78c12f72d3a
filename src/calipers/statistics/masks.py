"""Which tokens count: the mask of the batch that runs, in the shape of the tensor that is watched.

A mask is set around the forward pass of a batch; experts narrow it to the tokens routed to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from calipers.errors import LayoutError, Option, mask_of_scores

_current: ContextVar[Tensor | None] = ContextVar("calipers_token_mask", default=None)


def current_mask() -> Tensor | None:
    """Return the mask of what runs now, False for "leave out"; None where every token counts."""
    return _current.get()


@contextmanager
def token_mask(mask: Tensor | None) -> Iterator[None]:
    """Set the (batch, sequence) mask that a model is called with, for its forward pass.

    >>> import torch
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

    >>> import torch
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
