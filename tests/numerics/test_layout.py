from __future__ import annotations

import pytest
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import CUTS

from calipers.errors import ConfigurationError, LayoutError
from calipers.numerics.layout import (
    STRATEGIES,
    Layout,
    flatten_for_calibration,
    granularity_name,
    has_few_scales,
    has_global_scale,
    indivisible_by,
    shared_columns,
)

BLOCK = {"strategy": "block", "block_structure": [4, 16]}


def args_for(strategy: str) -> QuantizationArgs:
    extra: dict[str, object] = {}
    if strategy in ("group", "tensor_group"):
        extra["group_size"] = 16
    if strategy == "block":
        extra["block_structure"] = [4, 16]
    return QuantizationArgs(strategy=strategy, dynamic=strategy == "token", **extra)


@pytest.mark.parametrize(
    ("base_name", "strategy", "shape", "expected"),
    [
        ("weight", "tensor", (6, 64), (1, 1, 384)),
        ("weight", "channel", (6, 64), (1, 6, 1, 64)),
        ("weight", "group", (6, 64), (1, 6, 4, 16)),
        ("weight", "tensor_group", (6, 64), (1, 6, 4, 16)),
        ("weight", "tensor", (3, 6, 64), (1, 1, 1152)),
        ("weight", "channel", (3, 6, 64), (1, 3, 6, 1, 64)),
        ("weight", "group", (3, 6, 64), (1, 3, 6, 4, 16)),
        ("weight", "tensor_group", (2, 3, 6, 64), (1, 2, 3, 6, 4, 16)),
        ("weight", "block", (8, 64), (1, 2, 4, 64)),
        ("weight", "block", (7, 60), (1, 2, 4, 64)),
        ("input", "tensor", (64,), (1, 1, 64)),
        ("input", "tensor", (5, 64), (5, 1, 64)),
        ("output", "tensor", (2, 5, 64), (10, 1, 64)),
        ("input", "tensor", (2, 5, 3, 64), (30, 1, 64)),
        ("input", "group", (64,), (1, 4, 16)),
        ("input", "group", (2, 5, 64), (10, 4, 16)),
        ("output", "tensor_group", (2, 5, 3, 64), (30, 4, 16)),
        ("input", "token", (2, 5, 64), (2, 5, 64)),
        ("input", "token", (5, 64), (5, 64)),
        ("input", "token", (64,), (1, 64)),
        ("q", "tensor", (2, 4, 5, 8), (10, 1, 32)),
        ("k", "attn_head", (2, 4, 5, 8), (10, 4, 1, 1, 8)),
        ("v", "attn_head", (1, 1, 1, 1), (1, 1, 1, 1, 1)),
    ],
)
def test_canonical_shapes(
    base_name: str, strategy: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert (
        flatten_for_calibration(torch.zeros(shape), base_name, args_for(strategy)).shape == expected
    )


@pytest.mark.parametrize("name", CUTS)
def test_each_piece_holds_the_values_that_share_a_scale(name: str) -> None:
    base_name, shape, kwargs = CUTS[name]
    args = QuantizationArgs(**kwargs)
    value = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    view = flatten_for_calibration(value, base_name, args)
    for home, values in reference.pieces(value, base_name, args).items():
        seen = view[(slice(None), *home)].flatten()
        assert sorted(seen[seen != 0].tolist()) == sorted(values.tolist())


def test_every_other_combination_is_refused() -> None:
    for base_name, allowed in STRATEGIES.items():
        for strategy in set(sum(STRATEGIES.values(), ())) - set(allowed):
            with pytest.raises(LayoutError) as caught:
                Layout.of(base_name, args_for(strategy))
            assert str(caught.value) == (
                f"Strategy '{strategy}' cannot be applied to '{base_name}'. "
                f"Allowed: {', '.join(allowed)}."
            )


@pytest.mark.parametrize(
    ("strategy", "name", "columns", "few"),
    [
        ("tensor", "tensor", None, True),
        ("channel", "channel", None, False),
        ("group", "group 16", 16, False),
        ("tensor_group", "tensor_group 16", 16, False),
        ("block", "block 4x16", 16, False),
        ("token", "token", None, False),
        ("attn_head", "attn_head", None, True),
    ],
)
def test_what_is_asked_of_a_granularity(
    strategy: str, name: str, columns: int | None, few: bool
) -> None:
    args = args_for(strategy)
    assert granularity_name(args) == name
    assert shared_columns(args) == columns
    assert indivisible_by(64, args) is None
    assert indivisible_by(40, args) == columns
    assert has_few_scales(args) == few
    assert has_global_scale(args) == (strategy == "tensor_group")


def test_unknown_base_name() -> None:
    with pytest.raises(ConfigurationError) as caught:
        flatten_for_calibration(torch.zeros(2, 2), "bias", QuantizationArgs())
    assert str(caught.value) == "Unknown base_name 'bias'. Allowed: weight, input, output, q, k, v."


def test_indivisible_group_names_what_would_fit() -> None:
    args = QuantizationArgs(num_bits=4, group_size=128)
    with pytest.raises(LayoutError) as caught:
        flatten_for_calibration(torch.zeros(4, 288), "weight", args)
    assert str(caught.value) == (
        "Strategy 'group' needs group_size to divide the last dimension of 'weight': 288 is not "
        "divisible by 128. Group sizes that divide it: 16, 32, 96."
    )
    with pytest.raises(LayoutError, match="Use strategy 'channel', or ignore this module"):
        flatten_for_calibration(torch.zeros(4, 7), "input", args)


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [(s, (64,)) for s in ("channel", "group", "tensor_group", "block")] + [("block", (2, 4, 64))],
)
def test_a_weight_has_two_dimensions(strategy: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="needs a weight of two dimensions, got shape"):
        flatten_for_calibration(torch.zeros(shape), "weight", args_for(strategy))


def test_scalars_and_wrong_attention_shapes() -> None:
    with pytest.raises(LayoutError, match="'input' must have at least one dimension, got a scalar"):
        flatten_for_calibration(torch.tensor(1.0), "input", QuantizationArgs())
    with pytest.raises(LayoutError, match=r"\(batch, heads, sequence, head_dim\), got \(2, 3\)"):
        flatten_for_calibration(torch.zeros(2, 3), "k", QuantizationArgs())


def test_views_of_contiguous_memory_are_not_copies() -> None:
    for name in ("weight-tensor", "weight-channel", "weight-group", "input-tensor", "input-group"):
        base_name, shape, kwargs = CUTS[name]
        value = torch.zeros(shape)
        view = flatten_for_calibration(value, base_name, QuantizationArgs(**kwargs))
        assert view.data_ptr() == value.data_ptr()


class TestGroupIndex:
    args = QuantizationArgs(num_bits=4, group_size=2)

    def test_columns_of_a_group_come_together_in_their_order(self) -> None:
        weight = torch.tensor([[10.0, 11.0, 12.0, 13.0]])
        view = Layout.of("weight", self.args, torch.tensor([1, 0, 1, 0])).view(weight)
        assert view.tolist() == [[[[11.0, 13.0], [10.0, 12.0]]]]

    @pytest.mark.parametrize(
        "g_idx", [None, torch.tensor([-1, -1, -1, -1]), torch.tensor([1, 0, -1, 0])]
    )
    def test_minus_one_means_column_order(self, g_idx: torch.Tensor | None) -> None:
        weight = torch.arange(4.0).reshape(1, 4)
        view = Layout.of("weight", self.args, g_idx).view(weight)
        assert view.tolist() == [[[[0.0, 1.0], [2.0, 3.0]]]]

    def test_uneven_groups_are_refused(self) -> None:
        with pytest.raises(LayoutError, match=r"each group 2 times .* from 1 to 3 columns"):
            Layout.of("weight", self.args, torch.tensor([0, 0, 0, 1]))

    def test_wrong_length_is_refused(self) -> None:
        layout = Layout.of("weight", self.args, torch.tensor([0, 0, 1, 1]))
        with pytest.raises(LayoutError, match="g_idx has 4 entries for 6 columns"):
            layout.view(torch.zeros(1, 6))

    @pytest.mark.parametrize(("base_name", "strategy"), [("weight", "channel"), ("input", "group")])
    def test_it_has_no_meaning_elsewhere(self, base_name: str, strategy: str) -> None:
        with pytest.raises(LayoutError, match=f"no meaning for '{base_name}' with strategy"):
            Layout.of(base_name, args_for(strategy), torch.tensor([0, 0, 1, 1]))


class TestMask:
    def test_activations(self) -> None:
        layout = Layout.of("input", args_for("tensor"))
        x = torch.arange(12.0).reshape(2, 2, 3)
        kept = layout.select_tokens(x, torch.tensor([[1, 0], [0, 1]]))
        assert kept.tolist() == [[0.0, 1.0, 2.0], [9.0, 10.0, 11.0]]

    def test_attention_states(self) -> None:
        layout = Layout.of("k", args_for("attn_head"))
        k = torch.arange(24.0).reshape(2, 2, 3, 2)  # batch, heads, sequence, head_dim
        mask = torch.tensor([[True, False, False], [False, False, True]])
        view = layout.view(layout.select_tokens(k, mask))
        assert view.squeeze().tolist() == [
            [k[0, 0, 0].tolist(), k[0, 1, 0].tolist()],
            [k[1, 0, 2].tolist(), k[1, 1, 2].tolist()],
        ]

    def test_wrong_shape(self) -> None:
        layout = Layout.of("input", args_for("tensor"))
        with pytest.raises(LayoutError, match=r"shape \(2, 4\), got \(4, 2\)"):
            layout.select_tokens(torch.zeros(2, 4, 8), torch.ones(4, 2))

    def test_a_mask_that_is_added_is_not_one_that_chooses(self) -> None:
        layout = Layout.of("input", args_for("tensor"))
        with pytest.raises(LayoutError, match="added to attention scores"):
            layout.select_tokens(torch.zeros(2, 4), torch.tensor([0.0, -torch.inf]))

    def test_not_with_a_scale_for_each_position(self) -> None:
        layout = Layout.of("input", args_for("token"))
        with pytest.raises(LayoutError, match="it takes no mask"):
            layout.select_tokens(torch.zeros(2, 4), torch.ones(2))

    def test_not_for_weights(self) -> None:
        layout = Layout.of("weight", args_for("tensor"))
        with pytest.raises(LayoutError, match="cannot be applied to a weight"):
            layout.select_tokens(torch.zeros(2, 4), torch.ones(2))
