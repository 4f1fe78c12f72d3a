"""Which tokens count: the mask of the batch that runs, in the shape of the tensor that is watched.

A mask is set around the forward pass of a batch; experts narrow it to the tokens routed to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from calipers.errors import LayoutError, Option, mask_of_scores


@dataclass(frozen=True, eq=False)
class TokenMask:
    """One entry per token, False for "leave out"; None where every token counts."""

    mask: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor | None) -> TokenMask:
        """Take the (batch, sequence) mask that a model is called with.

        >>> import torch
        >>> TokenMask.of(torch.tensor([[0, 1, 1]])).mask
        tensor([[False,  True,  True]])
        >>> TokenMask.of(torch.ones(2, 3)).mask is None
        True
        """
        if mask is None:
            return cls()
        if mask.ndim != 2:
            raise LayoutError(
                "A mask of a batch must have shape (batch, sequence)", got=f"{tuple(mask.shape)}"
            )
        if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
            raise mask_of_scores()
        return cls._without_idle(mask != 0)

    def routed(self, token_index: Tensor, tokens: int, where: str) -> TokenMask:
        """Return the mask of some of ``tokens`` flattened ones, in the order of their indices."""
        if self.mask is None:
            return self
        if self.mask.numel() != tokens:
            raise _other_tokens(where, self.mask, (tokens,))
        return self._without_idle(self.mask.reshape(-1).to(token_index.device)[token_index])

    @classmethod
    def _without_idle(cls, mask: Tensor) -> TokenMask:
        return cls(None if bool(mask.all()) else mask)


_EVERY_TOKEN = TokenMask()
_current: ContextVar[TokenMask] = ContextVar("calipers_token_mask", default=_EVERY_TOKEN)


def current_mask() -> TokenMask:
    """Return the mask of what runs now; an empty one outside of every ``with``."""
    return _current.get()


@contextmanager
def _set(mask: TokenMask) -> Iterator[TokenMask]:
    token = _current.set(mask)
    try:
        yield mask
    finally:
        _current.reset(token)


@contextmanager
def token_mask(mask: Tensor | None) -> Iterator[TokenMask]:
    """Set the (batch, sequence) mask for the forward pass of a batch; None if all tokens count."""
    with _set(TokenMask.of(mask)) as current:
        yield current


@contextmanager
def routed_tokens(token_index: Tensor, tokens: int, where: str = "experts") -> Iterator[TokenMask]:
    """Narrow the mask to the tokens that an expert sees, of the ``tokens`` that were routed."""
    with _set(current_mask().routed(token_index, tokens, where)) as current:
        yield current


def mask_for(tensor: Tensor, base_name: str, where: str) -> Tensor | None:
    """Return the current mask in the shape that the tokens of a watched tensor have.

    ``None`` where every token counts, and for weights, which have none.

    >>> import torch
    >>> with token_mask(torch.tensor([[0, 1, 1]])):
    ...     mask_for(torch.zeros(3, 8), "input", "mlp.up_proj")
    tensor([False,  True,  True])
    """
    mask = current_mask().mask
    if mask is None or base_name == "weight":
        return None
    fitting = _over_states(mask, tensor) if base_name in "qkv" else _over_hidden(mask, tensor)
    if fitting is None:
        raise _other_tokens(where, mask, tuple(tensor.shape))
    return fitting


def _other_tokens(where: str, mask: Tensor, shape: tuple[int, ...]) -> LayoutError:
    return LayoutError(
        f"the mask of shape {tuple(mask.shape)} does not say which tokens of the tensor of shape "
        f"{shape} count",
        where=where,
        hint="Use " + Option("batch_size", 1) + " or pack the data, so that there is no padding",
    )


def _over_states(mask: Tensor, states: Tensor) -> Tensor | None:
    """Lay the mask over attention states of shape (batch, heads, sequence, head_dim)."""
    tokens = (states.shape[0], states.shape[2]) if states.ndim == 4 else ()
    return mask.reshape(tokens) if tokens in (mask.shape, (1, mask.numel())) else None


def _over_hidden(mask: Tensor, hidden: Tensor) -> Tensor | None:
    """Lay the mask over an activation; dimensions after those of the tokens share its entries."""
    leading = tuple(hidden.shape[:-1])
    for tokens in (tuple(mask.shape), (mask.numel(),), (1, mask.numel())):
        if leading[: len(tokens)] == tokens:
            rest = (1,) * (len(leading) - len(tokens))
            return mask.reshape(*tokens, *rest).expand(leading)
    # A dimension of one may stand between those of the tokens: (batch, 1, sequence, features).
    if [size for size in leading if size != 1] == [size for size in mask.shape if size != 1]:
        return mask.reshape(leading)
    return None
