"""What observers make of the tensors they see."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from laws import FOR_INPUTS, PROMISES

from calipers.errors import TensorValueError
from calipers.observers import (
    Observer,
    get_observer_token_count,
)

INT4 = QuantizationArgs(num_bits=4, group_size=4)
INT8 = QuantizationArgs(num_bits=8)
build = Observer.load_from_registry


class TestObserving:
    def test_forward_returns_the_observer(self) -> None:
        observer = build("minmax", args=INT4)
        assert observer(torch.ones(2, 4)) is observer

    def test_unpacks_into_scale_and_zero_point(self) -> None:
        x = torch.randn(64, 512)
        args = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
        scale, zero_point = build("minmax", quantization_args=args)(x)
        assert scale.shape == zero_point.shape == (64, 4)
        expected = calculate_qparams(*torch.aminmax(x.view(64, 4, 128), dim=-1), args)
        assert torch.equal(scale, expected[0])
        assert torch.equal(zero_point, expected[1])

    def test_memories(self) -> None:
        """A stream of three batches, worked out by hand."""
        stream = [
            torch.tensor([[-1.0, 2.0]]),
            torch.tensor([[-3.0, 1.0]]),
            torch.tensor([[0.0, 8.0]]),
        ]
        expected = {
            "memoryless_minmax": (0.0, 8.0),
            "static_minmax": (-3.0, 8.0),
            "minmax": (0.75 * (0.75 * -1 + 0.25 * -3), 0.75 * (0.75 * 2 + 0.25 * 1) + 0.25 * 8),
        }
        for name, (low, high) in expected.items():
            options = {"averaging_constant": 0.25} if name == "minmax" else {}
            observer = build(name, base_name="input", args=INT8, **options)
            for batch in stream:
                observer(batch)
            assert observer.min_vals.item() == pytest.approx(low)
            assert observer.max_vals.item() == pytest.approx(high)

    @pytest.mark.parametrize("name", ["minmax", "mse"])
    def test_averaging_constant_one_has_no_memory(self, name: str) -> None:
        observer = build(name, base_name="input", args=INT8, averaging_constant=1.0)
        alone = build(f"memoryless_{name}", base_name="input", args=INT8)
        batches = [torch.randn(4, 8) * k for k in (9, 1, 3)]
        for batch in batches:
            observer(batch)
        assert torch.equal(
            observer.get_qparams()["scale"], alone(batches[-1]).get_qparams()["scale"]
        )

    def test_moving_averages_of_searched_ranges(self) -> None:
        batches = [torch.randn(16, 8) for _ in range(5)]
        args = QuantizationArgs(num_bits=4)
        observer = build("mse", base_name="input", args=args, averaging_constant=0.3)
        expected = None
        for batch in batches:
            observer(batch)
            found = build("memoryless_mse", base_name="input", args=args)(batch).max_vals.double()
            expected = found if expected is None else 0.7 * expected + 0.3 * found
        torch.testing.assert_close(observer.max_vals.double(), expected, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_averages_are_not_rounded_to_half_precision(self, dtype: torch.dtype) -> None:
        """In bfloat16 a step of one percent of a small difference would never be made."""
        observer = build("minmax", base_name="input", args=INT8)
        observer(torch.tensor([[-1.0, 1.0]], dtype=dtype))
        for _ in range(500):
            observer(torch.tensor([[-1.0, 1.25]], dtype=dtype))
        assert observer.max_vals.item() == pytest.approx(1.25 - 0.25 * 0.99**500, rel=1e-5)
        assert observer.get_qparams()["scale"].dtype == dtype

    @pytest.mark.parametrize("name", PROMISES)
    @pytest.mark.filterwarnings("ignore:.*Falls back to plain error")
    def test_ignored_values_leave_no_trace_but_their_number(self, name: str) -> None:
        clean = torch.rand(4, 8) + 1  # zero is not in the range: filling it in must not show
        dirty = torch.cat([clean, torch.full((4, 4), math.nan)], 1)
        dirty[0, -1], dirty[1, -1] = math.inf, -math.inf
        by_channel = QuantizationArgs(num_bits=4, strategy="channel", symmetric=False)
        whole = QuantizationArgs(num_bits=8, symmetric=False)
        args = by_channel if PROMISES[name].suits(by_channel) else whole
        ours = build(name, args=args, nonfinite="ignore")(dirty)
        pure = build(name, args=args)(clean)
        assert ours.num_nonfinite == 16
        assert torch.equal(ours.min_vals, pure.min_vals)
        assert torch.equal(ours.max_vals, pure.max_vals)
        assert torch.equal(ours.get_qparams()["scale"], pure.get_qparams()["scale"])

    @pytest.mark.parametrize(
        ("dtype", "working"),
        [
            (torch.bool, torch.float32),
            (torch.uint8, torch.float32),
            (torch.int8, torch.float32),
            (torch.int16, torch.float32),
            (torch.int32, torch.float64),
            (torch.int64, torch.float64),
            (torch.float8_e4m3fn, torch.float32),
            (torch.float64, torch.float64),
        ],
    )
    def test_other_dtypes_are_exact(self, dtype: torch.dtype, working: torch.dtype) -> None:
        value = torch.tensor([[0, 1], [1, 1]]).to(dtype)
        if dtype in (torch.int32, torch.int64):
            value[0, 0] = 2**30 + 1
        observer = build("static_minmax", args=INT8)(value)
        assert observer.max_vals.dtype == working
        assert observer.max_vals.item() == value.double().max().item()

    def test_mixed_dtypes_promote(self) -> None:
        observer = build("minmax", base_name="input", args=INT8)
        observer(torch.ones(1, 2, dtype=torch.bfloat16))(torch.ones(1, 2))
        assert observer.get_qparams()["scale"].dtype == torch.float32

    def test_masked_tokens_change_nothing(self) -> None:
        for name in FOR_INPUTS:
            if name in ("imatrix_mse", "nvfp4_expanded_imatrix"):  # they warn
                continue
            x = torch.randn(3, 5, 8)
            mask = torch.rand(3, 5) > 0.5
            spoiled = torch.where(mask[..., None], x, torch.nan)
            masked = build(name, base_name="input", args=INT8)(spoiled, mask=mask)
            plain = build(name, base_name="input", args=INT8)(x[mask])
            assert masked.num_observed_tokens == plain.num_observed_tokens == int(mask.sum())
            assert torch.equal(masked.max_vals, plain.max_vals)
            nothing = build(name, base_name="input", args=INT8)(x, mask=torch.zeros(3, 5))
            assert not nothing.fields()

    def test_gradients_and_inference_mode(self) -> None:
        weight = torch.nn.Parameter(torch.randn(4, 8))
        observer = build("static_minmax", args=INT4)(weight)
        assert not observer.min_vals.requires_grad
        in_torch = build("minmax", args=INT4)(torch.nn.Parameter(torch.randn(4, 8).double()))
        assert not in_torch.min_vals.requires_grad
        with torch.inference_mode():
            observer(torch.randn(4, 8))
        observer(torch.randn(4, 8))
        assert copy.deepcopy(observer).get_qparams()["scale"].shape == (4, 2)

    def test_views_with_strides(self) -> None:
        weight = torch.randn(8, 6).T
        for strategy in ("tensor", "channel"):
            args = QuantizationArgs(num_bits=8, strategy=strategy)
            strided = build("memoryless_mse", args=args)(weight)
            plain = build("memoryless_mse", args=args)(weight.contiguous())
            assert torch.equal(strided.max_vals, plain.max_vals)

    def test_g_idx(self) -> None:
        weight, g_idx = torch.randn(3, 8), torch.tensor([1, 0, 1, 0, 1, 0, 1, 0])
        shuffled = build("memoryless_mse", args=INT4)(weight, g_idx=g_idx)
        sorted_by_hand = torch.cat([weight[:, 1::2], weight[:, ::2]], 1)
        plain = build("memoryless_mse", args=INT4)(sorted_by_hand)
        assert torch.equal(shuffled.get_qparams()["scale"], plain.get_qparams()["scale"])


class TestPiecesWithoutFiniteValues:
    @pytest.mark.parametrize("name", ["minmax", "mse", "static_minmax", "memoryless_minmax"])
    def test_a_tensor_of_them_counts_but_changes_nothing(self, name: str) -> None:
        observer = build(name, base_name="input", args=INT8, nonfinite="ignore")
        observer(torch.full((2, 4), math.nan))
        assert not observer.has_statistics
        assert observer.num_nonfinite == 8
        observer(torch.ones(2, 4))(torch.full((2, 4), math.inf))
        assert observer.max_vals.item() == 1
        assert observer.num_observed_tokens == 2

    @pytest.mark.parametrize("name", ["minmax", "mse", "static_minmax"])
    def test_a_piece_of_them_stays_as_it_was(self, name: str) -> None:
        args = QuantizationArgs(num_bits=8, group_size=2)
        options = {} if name == "static_minmax" else {"averaging_constant": 0.5}
        observer = build(name, base_name="input", args=args, nonfinite="ignore", **options)
        observer(torch.full((2, 4), 8.0))
        before = observer.max_vals.clone()
        observer(torch.tensor([[math.inf, math.nan, 8.0, 8.0]]))
        torch.testing.assert_close(observer.max_vals, before)


class TestStateInAModel:
    def model(self) -> torch.nn.Linear:
        linear = torch.nn.Linear(8, 4)
        linear.input_observer = build("static_minmax", base_name="input", args=INT8)
        return linear

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_checkpoint_of_the_model_alone_leaves_statistics(self, strict: bool) -> None:
        model = self.model()
        model.input_observer(torch.ones(1, 8))
        model.load_state_dict(torch.nn.Linear(8, 4).state_dict(), strict=strict)
        assert model.input_observer.max_vals.item() == 1

    def test_what_is_missing_elsewhere_does_not_matter_here(self) -> None:
        model = self.model()
        model.input_observer(torch.ones(1, 8))
        saved = model.state_dict()
        del saved["bias"]
        other = self.model()
        other.load_state_dict(saved, strict=False)
        assert other.input_observer.max_vals.item() == 1

    def test_nothing_is_no_state(self) -> None:
        with pytest.raises(RuntimeError, match="_extra_state"):
            build("static_minmax", args=INT4).load_state_dict({})

    def test_a_state_with_a_hole_is_refused(self) -> None:
        saved = build("static_minmax", args=INT4)(torch.ones(2, 4)).state_dict()
        del saved["max_vals"]
        other = build("static_minmax", args=INT4)
        with pytest.raises(RuntimeError, match=r"Missing key.*max_vals"):
            other.load_state_dict(saved)
        assert not other.fields()

    def test_a_state_of_the_wrong_shape_is_refused(self) -> None:
        saved = build("static_minmax", args=INT4)(torch.ones(2, 4)).state_dict()
        saved["max_vals"] = torch.ones(7)
        other = build("static_minmax", args=INT4)
        with pytest.raises(RuntimeError, match=r"max_vals was saved with shape \[2, 1\]"):
            other.load_state_dict(saved)
        assert not other.fields()


def test_what_keeps_only_the_last_tensor_takes_any_shape() -> None:
    args = QuantizationArgs(num_bits=4, strategy="channel")
    observer = build("memoryless_minmax", args=args)(torch.ones(4, 8))(torch.ones(2, 8))
    assert observer.get_qparams()["scale"].shape == (2, 1)


def test_float64_streams_are_averaged_in_float64() -> None:
    observer = build("minmax", base_name="input", args=INT8)
    for value in (1.0, 1.0 + 1e-9):
        observer(torch.tensor([[value]], dtype=torch.float64))
    assert observer.max_vals.item() == pytest.approx(1 + 1e-11, rel=1e-14, abs=0)


def test_nothing_is_kept_of_the_tensor_itself() -> None:
    observer = build("minmax", base_name="input", args=INT8)(torch.ones(2, 4))
    assert observer._observation is None
    with pytest.raises(TensorValueError, match="was given 8 non-finite values"):
        observer(torch.full((2, 4), math.nan))
    assert observer._observation is None


def test_merging_stays_on_its_own_device() -> None:
    here = build("static_minmax", args=INT8)(torch.ones(2, 2))
    there = build("static_minmax", args=INT8)(torch.ones(2, 2))
    there.to("meta").merge(here)
    assert {value.device.type for value in there.fields().values()} == {"meta"}
    assert {value.device.type for value in here.fields().values()} == {"cpu"}


class TestTokens:
    def test_counting(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for layer in model:
            layer.input_observer = build("static_minmax", base_name="input", args=INT8)
            layer.weight_observer = build("minmax", args=INT4)(layer.weight)
        model[0].input_observer(torch.randn(2, 3, 4))(torch.randn(5, 4))
        assert get_observer_token_count(model) == {"0": 11, "1": 0}
        model[1].input_observer(torch.randn(7, 4))
        model[1].output_observer = build("static_minmax", base_name="output", args=INT8)
        model[1].output_observer(torch.randn(6, 4))
        assert get_observer_token_count(model) == {"0": 11, "1": 7}

    def test_attention_states(self) -> None:
        observer = build("static_minmax", base_name="k", args=INT8)(torch.randn(2, 3, 5, 4))
        assert observer.num_observed_tokens == 10

    def test_first_generation_code_does_not_say_what_it_observes(self) -> None:
        observer = build("minmax", quantization_args=INT8)
        assert observer(torch.randn(2, 3, 4)).num_observed_tokens == 6
        observer.reset()
        assert observer(torch.randn(3, 4)).num_observed_tokens == 0
