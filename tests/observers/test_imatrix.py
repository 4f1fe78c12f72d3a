from __future__ import annotations

import warnings

import numpy as np
import pytest
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import nvfp4

from calipers.errors import CalipersWarning, ImportanceError, TensorValueError
from calipers.observers import IMatrixMSEObserver, Observer
from calipers.observers.classic import searched_range
from calipers.observers.definition import Definition
from calipers.solvers.importance import Importance

INT4 = QuantizationArgs(num_bits=4, group_size=8)
NVFP4 = nvfp4(8)
CHANNEL = QuantizationArgs(num_bits=3, strategy="channel")


def build(args: QuantizationArgs = INT4, base_name: str = "weight", **options: object) -> Observer:
    return Observer.load_from_registry("imatrix_mse", base_name=base_name, args=args, **options)


def hot_inputs(tokens: int = 64, channels: int = 24) -> torch.Tensor:
    return torch.randn(tokens, channels) * torch.linspace(0.01, 5, channels)


def gathered(linear: torch.nn.Linear, x: torch.Tensor, **options: object) -> Observer:
    observer = build(**options)
    observer.attach(linear)
    linear(x)
    observer.detach(linear)
    return observer


class TestHook:
    def test_sums_squares_and_tokens(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs()
        observer = build()
        observer.attach(linear)
        linear(x.reshape(4, 16, 24))
        linear(x[0])
        exact = x.double().square().sum(0) + x[0].double().square()
        torch.testing.assert_close(observer._imatrix_sum, exact, rtol=1e-6, atol=0)
        assert int(observer._imatrix_count) == 65
        # In code of the field the sums are looked for on the module.
        assert torch.equal(linear._imatrix_sum, observer._imatrix_sum)
        assert int(linear._imatrix_count) == 65

    def test_masked_tokens_are_not_counted(self) -> None:
        observer, x = build(), hot_inputs()
        observer.inputs.update(x.reshape(4, 16, 24), torch.arange(64).reshape(4, 16) < 40)
        exact = x[:40].double().square().sum(0)
        torch.testing.assert_close(observer._imatrix_sum, exact, rtol=1e-6, atol=0)
        assert int(observer._imatrix_count) == 40

    def test_inputs_that_are_not_finite_are_refused(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs()
        observer = build()
        observer.module_name = "up_proj"
        observer.attach(linear)
        linear(x)
        before = linear._imatrix_sum.clone()
        x[3, 5] = torch.nan
        with pytest.raises(TensorValueError, match=r"\(weight of up_proj\) was given 1 non-finite"):
            linear(x)
        assert torch.equal(linear._imatrix_sum, before)
        assert int(observer._imatrix_count) == int(linear._imatrix_count) == 64
        observer.nonfinite = "ignore"
        linear(x)
        assert int(linear._imatrix_count) == 64 + 63

    def test_sums_take_no_part_in_gradients(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs().requires_grad_()
        observer = gathered(linear, x)
        assert not observer._imatrix_sum.requires_grad

    def test_observing_does_not_change_the_output(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs()
        expected = linear(x)
        observer = build()
        observer.attach(linear)
        assert torch.equal(linear(x), expected)
        assert torch.equal(linear(input=x), expected)
        assert int(observer._imatrix_count) == 128

    def test_detach_removes_the_hook_and_leaves_the_sums(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs()
        gathered(linear, x)
        assert not linear._forward_pre_hooks
        linear(x)
        assert int(linear._imatrix_count) == 64

    def test_the_next_observer_picks_them_up_instead_of_hooking(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs()
        first = gathered(linear, x)
        second = build()
        second.attach(linear)
        assert not linear._forward_pre_hooks
        assert not hasattr(linear, "_imatrix_sum")
        assert torch.equal(second._imatrix_sum, first._imatrix_sum)
        second.detach(linear)
        assert not hasattr(linear, "_imatrix_sum")
        ours, theirs = first(linear.weight), second(linear.weight)
        assert torch.equal(ours.max_vals, theirs.max_vals)

    def test_a_module_without_in_features_is_left_alone(self) -> None:
        module = torch.nn.LayerNorm(4)
        build().attach(module)
        assert not module._forward_pre_hooks
        assert not hasattr(module, "_imatrix_sum")

    def test_two_observers_at_once(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs()
        first, second = build(), build()
        first.attach(linear)
        second.attach(linear)
        linear(x)
        assert int(first._imatrix_count) == int(second._imatrix_count) == 64
        first.detach(linear)
        second.detach(linear)
        assert not linear._forward_pre_hooks
        assert set(vars(linear)) - set(vars(torch.nn.Linear(24, 4))) == {
            "_imatrix_sum",
            "_imatrix_count",
        }

    def test_attaching_elsewhere_leaves_the_first_module(self) -> None:
        first, second = torch.nn.Linear(24, 4), torch.nn.Linear(24, 4)
        observer = build()
        observer.attach(first)
        observer.attach(second)
        assert not first._forward_pre_hooks
        assert len(list(observer.modules())) == 1
        observer.detach(first)
        second(hot_inputs())
        assert int(observer._imatrix_count) == 64

    def test_modules_whose_parameters_are_elsewhere(self) -> None:
        linear = torch.nn.Linear(24, 4, device="meta")
        observer = build()
        observer.attach(linear)
        next(iter(linear._forward_pre_hooks.values()))(linear, (hot_inputs(),), {})
        assert int(observer._imatrix_count) == 64

        class Bare(torch.nn.Module):
            in_features = 24

            def forward(self, x: object) -> object:
                return x

        bare, observer = Bare(), build()
        observer.attach(bare)
        bare((hot_inputs(5), torch.ones(3)))
        assert int(observer._imatrix_count) == 5

    def test_attaching_again_does_not_count_twice(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs()
        observer = build()
        observer.attach(linear)
        observer.attach(linear)
        linear(x)
        assert int(observer._imatrix_count) == 64

    def test_a_resumed_observer_goes_on_summing(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs()
        whole = gathered(linear, torch.cat([x, x]))
        del linear._imatrix_sum, linear._imatrix_count
        saved = gathered(linear, x).state_dict()
        del linear._imatrix_sum, linear._imatrix_count
        resumed = build()
        resumed.load_state_dict(saved)
        resumed.attach(linear)
        linear(x)
        torch.testing.assert_close(resumed._imatrix_sum, whole._imatrix_sum)
        assert int(resumed._imatrix_count) == 128

    def test_two_jobs_merge_before_the_weight_is_observed(self) -> None:
        linear, x = torch.nn.Linear(24, 4), hot_inputs()
        whole = gathered(linear, x)
        del linear._imatrix_sum, linear._imatrix_count
        first = gathered(linear, x[:20])
        del linear._imatrix_sum, linear._imatrix_count
        first.merge(gathered(linear, x[20:]))
        torch.testing.assert_close(first._imatrix_sum, whole._imatrix_sum, rtol=1e-12, atol=0)
        assert int(first._imatrix_count) == 64


@pytest.mark.parametrize("args", [INT4, NVFP4, CHANNEL], ids=["group", "tensor_group", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_minimizes_the_weighted_error(args: QuantizationArgs, dtype: torch.dtype) -> None:
    linear, x = torch.nn.Linear(24, 6).to(dtype), hot_inputs().to(dtype)
    observer = gathered(linear, x, args=args, patience=0)(linear.weight)
    importance = x.double().square().mean(0)
    importance = (importance / importance.mean()).numpy()
    low, high = reference.extrema(linear.weight.detach(), "weight", args)
    factors = [1 - i / 20 for i in range(20)]
    errors = reference.candidate_errors(
        linear.weight.detach(), "weight", args, low, high, factors, 3.0, importance, dtype
    )
    ratio = observer.max_vals.double() / high.double()
    chosen = (ratio.reshape(-1, 1) - torch.tensor(factors)).abs().argmin(1).numpy()
    assert (errors[chosen, np.arange(len(chosen))] <= errors.min(0) * (1 + 1e-5)).all()
    plain = Observer.load_from_registry(
        "memoryless_mse", args=args, maxshrink=1.0, grid=20, norm=3.0, patience=100
    )
    assert not torch.equal(plain(linear.weight).max_vals, observer.max_vals)


def test_importance_follows_g_idx() -> None:
    linear, x = torch.nn.Linear(24, 6), hot_inputs()
    x = x * 10.0 ** torch.linspace(-3, 3, 24)  # a wrong order would show
    g_idx = torch.arange(24) % 3
    order = torch.argsort(g_idx, stable=True)
    shuffled = gathered(linear, x)(linear.weight, g_idx=g_idx)
    del linear._imatrix_sum, linear._imatrix_count
    in_order = gathered(linear, x[:, order])(linear.weight[:, order])
    assert torch.equal(shuffled.max_vals, in_order.max_vals)


def test_patience_zero_tries_every_candidate() -> None:
    assert IMatrixMSEObserver("weight", INT4, patience=0).options.stop_after is None
    assert IMatrixMSEObserver("weight", INT4).options.stop_after == 5


@pytest.mark.parametrize(
    ("maxshrink", "grid", "count"), [(0.95, 20, 20), (0.0, 20, 2), (1.0, 20, 21), (0.01, 20, 2)]
)
def test_number_of_candidates(maxshrink: float, grid: int, count: int) -> None:
    options = IMatrixMSEObserver("weight", INT4, maxshrink=maxshrink, grid=grid).options
    assert options.factors == [1 - i / grid for i in range(count)]


class TestFallback:
    """Where importance cannot be used: plain error and one warning, or an error if strict."""

    PLACES = (
        (INT4, "input", r"'input' with strategy 'group' \(only for weights: channel, group"),
        (QuantizationArgs(num_bits=8), "weight", "strategy 'tensor'"),
        (
            QuantizationArgs(num_bits=8, strategy="block", block_structure=[2, 8]),
            "weight",
            "strategy 'block'",
        ),
    )

    @pytest.mark.parametrize(("args", "base_name", "reason"), PLACES)
    def test_kinds_without_importance(
        self, args: QuantizationArgs, base_name: str, reason: str
    ) -> None:
        value = torch.randn(4, 24)
        with pytest.raises(NotImplementedError, match=reason):
            build(args, base_name, strict=True)(value)
        self.check_falls_back(build(args, base_name), value, reason)

    @pytest.mark.parametrize(
        ("total", "count", "reason"),
        [
            (None, None, "no importance was gathered"),
            (torch.ones(24), 0, "no importance was gathered"),
            (torch.full((24,), torch.nan), 5, "importance has NaN or Inf in it"),
            (torch.full((24,), torch.inf), 5, "importance has NaN or Inf in it"),
            (-torch.ones(24), 5, "importance has negative values"),
            (torch.zeros(24), 5, "importance is zero for every channel"),
            (torch.ones(23), 5, "importance has 23 channels for 24 columns of the weight"),
        ],
    )
    def test_importance_that_cannot_be_used(
        self, total: torch.Tensor | None, count: int | None, reason: str
    ) -> None:
        def with_sums(**options: object) -> Observer:
            observer = build(**options)
            if total is not None and count is not None:
                observer._imatrix_sum, observer._imatrix_count = total, torch.tensor(count)
            return observer

        weight = torch.randn(4, 24)
        with pytest.raises(ImportanceError) as caught:
            with_sums(strict=True)(weight)
        assert str(caught.value) == (
            f"Observer 'imatrix_mse' (weight): {reason}. "
            "With strict=False it would fall back to plain error."
        )
        self.check_falls_back(with_sums(), weight, reason)

    def check_falls_back(self, observer: Observer, value: torch.Tensor, reason: str) -> None:
        with pytest.warns(CalipersWarning, match=reason) as caught:
            observer(value)
        assert len(caught) == 1
        plain = build(observer.args, observer.base_name)
        plain.definition = Definition(search=searched_range)
        plain.gathering.importance = Importance()
        assert torch.equal(observer.max_vals, plain(value).max_vals)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            observer(value)  # said once
