"""The mask of a batch, in the shape of whatever is watched."""

from __future__ import annotations

import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers.errors import LayoutError
from calipers.numerics.layout import Layout
from calipers.numerics.tensors import current_mask, mask_for, routed_tokens, token_mask

MASK = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
B, S = MASK.shape


@pytest.mark.parametrize(
    ("shape", "base_name"),
    [
        ((B, S, 8), "input"),
        ((B, S, 8), "output"),
        ((B * S, 8), "input"),
        ((1, B * S, 8), "input"),
        ((B, S, 3, 8), "input"),
        ((B, 1, S, 8), "input"),
        ((B * S, 3, 8), "output"),
        ((B, 3, S, 8), "q"),
        ((B, 1, S, 8), "k"),
        ((1, 3, B * S, 8), "v"),
    ],
)
def test_layouts_take_the_mask(shape: tuple[int, ...], base_name: str) -> None:
    """Each token is marked by its own number, or -1 if it must not count."""
    number = torch.where(MASK.bool(), torch.arange(B * S).reshape(B, S), -1).float()
    if base_name in ("q", "k", "v") or shape[:3] == (B, 1, S):
        tensor = number.reshape(shape[0], 1, shape[2], 1).expand(shape)
    else:
        tokens = 2 if shape[:2] in ((B, S), (1, B * S)) else 1
        tensor = number.reshape(*shape[:tokens], *(1,) * (len(shape) - tokens)).expand(shape)
    with token_mask(MASK):
        mask = mask_for(tensor, base_name, "here")
    assert mask is not None
    layout = Layout.of(base_name, QuantizationArgs(strategy="tensor"))
    kept = layout.select_tokens(tensor, mask)
    assert kept.unique().tolist() == [2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("mask", [None, torch.ones(B, S), torch.ones(B, S, dtype=torch.bool)])
def test_nothing_to_leave_out_is_no_mask(mask: torch.Tensor | None) -> None:
    with token_mask(mask):
        assert mask_for(torch.zeros(7, 8), "input", "here") is None


def test_weights_have_no_tokens() -> None:
    with token_mask(MASK):
        assert mask_for(torch.zeros(7, 8), "weight", "here") is None


def test_routed_tokens_narrow_the_mask() -> None:
    with token_mask(MASK):
        with routed_tokens(torch.tensor([9, 0, 3]), B * S):
            mask = mask_for(torch.zeros(3, 8), "input", "here")
            assert mask is not None
            assert mask.tolist() == [True, False, True]
        with routed_tokens(torch.tensor([9, 8]), B * S):
            assert mask_for(torch.zeros(2, 8), "input", "here") is None
        with routed_tokens(torch.tensor([], dtype=torch.int64), B * S):
            assert mask_for(torch.zeros(0, 8), "input", "here") is None
        outer = mask_for(torch.zeros(B, S, 8), "input", "here")
        assert outer is not None
        assert torch.equal(outer, MASK.bool())


def fail_under(mask: torch.Tensor) -> None:
    with token_mask(mask):
        assert torch.equal(current_mask(), mask.bool())
        raise ZeroDivisionError


def test_masks_nest_and_errors_restore_them() -> None:
    assert current_mask() is None
    with token_mask(MASK):
        with pytest.raises(ZeroDivisionError):
            fail_under(1 - MASK)
        assert torch.equal(current_mask(), MASK.bool())
        with token_mask(None):
            assert current_mask() is None
    assert current_mask() is None


@pytest.mark.parametrize(
    ("shape", "base_name"),
    [
        ((S, B, 8), "input"),
        ((B, 3, S, 8), "input"),
        ((B, S + 1, 8), "input"),
        ((7, 8), "output"),
        ((8,), "input"),
        ((B, 3, S + 1, 8), "k"),
        ((B * S, 3, 2, 8), "q"),
        ((B, S, 8), "v"),
    ],
)
def test_tokens_of_another_shape_are_refused(shape: tuple[int, ...], base_name: str) -> None:
    message = (
        f"layers.0: the mask of shape (2, 5) does not say which tokens of the tensor of shape "
        f"{shape} count. Use batch_size=1 or pack the data, so that there is no padding."
    )
    with token_mask(MASK), pytest.raises(LayoutError, match=re.escape(message)):
        mask_for(torch.zeros(shape), base_name, "layers.0")


def test_routing_of_other_tokens_is_refused() -> None:
    expected = r"^moe: the mask of shape \(2, 5\) .* shape \(7,\)"
    routing = routed_tokens(torch.tensor([0]), 7, "moe")
    with token_mask(MASK), pytest.raises(LayoutError, match=expected), routing:
        pass


def test_other_masks_are_refused() -> None:
    shape = r"\(batch, sequence\), got \(2, 1, 5, 5\)"
    with pytest.raises(LayoutError, match=shape), token_mask(torch.ones(2, 1, 5, 5)):
        pass
    added = torch.zeros(2, 5).masked_fill(MASK == 0, -torch.inf)
    with pytest.raises(LayoutError, match="added to attention scores"), token_mask(added):
        pass
