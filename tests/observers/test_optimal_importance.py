"""How inputs are gathered, and what happens where they tell little or nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DTYPES, draw, nvfp4
from pairwise import pairwise
from torch import Tensor
from weights import (
    COLUMNS,
    FIELDS,
    INT4,
    SCALES,
    arguments,
    build,
    gathered,
    inputs,
    layer,
    rounded,
)

from calipers.errors import CalipersWarning, ConfigurationError, ImportanceError, NoStatisticsError
from calipers.observers import Observer


@pytest.mark.parametrize("importance", FIELDS)
class TestHook:
    def test_sums_stay_on_the_module_for_the_next(self, importance: str) -> None:
        linear, x = layer(), inputs()
        first = gathered(linear, x, importance=importance)
        assert not linear._forward_pre_hooks
        for name in FIELDS[importance]:
            assert torch.equal(getattr(linear, name), getattr(first, name))
        second = build(importance=importance)
        second.attach(linear)
        assert not linear._forward_pre_hooks
        assert not any(hasattr(linear, name) for name in FIELDS[importance])
        ours, theirs = first(linear.weight), second(linear.weight)
        assert torch.equal(ours.get_qparams()["scale"], theirs.get_qparams()["scale"])

    def test_another_observer_may_gather_meanwhile(self, importance: str) -> None:
        linear, x = layer(), inputs()
        other = Observer.load_from_registry("imatrix_mse", base_name="weight", args=INT4)
        ours, same = build(importance=importance), build(importance=importance)
        for observer in (other, ours, same):
            observer.attach(linear)
        assert len(linear._forward_pre_hooks) == 3
        linear(x.bfloat16())
        for observer in (other, ours, same):
            observer.detach(linear)
        alone = gathered(layer(), x, importance=importance)
        for name in FIELDS[importance]:
            assert torch.equal(getattr(ours, name), getattr(alone, name))
            assert torch.equal(getattr(same, name), getattr(alone, name))
        assert int(other._imatrix_count) == len(x)
        assert not linear._forward_pre_hooks

    def test_two_jobs_merge_before_the_weight_is_observed(self, importance: str) -> None:
        linear, x = layer(), torch.randint(-3, 4, (60, COLUMNS)).float()  # sums are exact
        whole = gathered(linear, x, importance=importance)
        first = gathered(layer(), x[:20], importance=importance)
        first.merge(gathered(layer(), x[20:], importance=importance))
        for name in FIELDS[importance]:
            assert torch.equal(getattr(first, name), getattr(whole, name))
        ours, theirs = first(linear.weight), whole(linear.weight)
        assert torch.equal(ours.get_qparams()["scale"], theirs.get_qparams()["scale"])

    def test_state_dict_before_and_after_observing(self, importance: str) -> None:
        linear = layer()
        original = gathered(linear, inputs(), importance=importance)
        before, loaded = build(importance=importance), build(importance=importance)
        before.load_state_dict(original.state_dict())
        before(linear.weight)
        original(linear.weight)
        loaded.load_state_dict(original.state_dict())
        expected = original.get_qparams()["scale"]
        assert torch.equal(before.get_qparams()["scale"], expected)
        assert torch.equal(loaded.get_qparams()["scale"], expected)
        with pytest.raises(NoStatisticsError, match=r"Call observer\(weight\) again"):
            loaded.report()
        again = loaded(linear.weight)  # the sums were saved with it
        assert torch.equal(again.get_qparams()["scale"], expected)

    def test_sums_take_no_part_in_gradients(self, importance: str) -> None:
        observer = gathered(layer(), inputs().requires_grad_(), importance=importance)
        assert not getattr(observer, FIELDS[importance][0]).requires_grad


def test_plain_error_needs_no_hook() -> None:
    linear = layer()
    build().attach(linear)
    assert not linear._forward_pre_hooks


class TestFallback:
    """Where importance cannot be used: plain error and one warning, or an error if strict."""

    @pytest.mark.parametrize(
        ("importance", "sums", "reason"),
        [
            ("imatrix", None, "no importance was gathered"),
            ("hessian", None, "no importance was gathered"),
            ("imatrix", torch.full((COLUMNS,), torch.nan), "importance has NaN or Inf in it"),
            ("imatrix", -torch.ones(COLUMNS), "importance has negative values"),
            ("imatrix", torch.zeros(COLUMNS), "importance is zero for every channel"),
            ("imatrix", torch.ones(63), "importance has 63 channels for 64 columns of the weight"),
            ("hessian", torch.ones(4, 16, 16) * torch.inf, "importance has NaN or Inf in it"),
            ("hessian", torch.ones(3, 16, 16), "importance has 48 channels for 64 columns of"),
            ("hessian", torch.zeros(4, 16, 16), "importance is zero for every channel"),
        ],
    )
    def test_importance_that_cannot_be_used(
        self, importance: str, sums: Tensor | None, reason: str
    ) -> None:
        def with_sums(**options: Any) -> Observer:
            observer = build(importance=importance, **options)
            if sums is not None:
                setattr(observer, FIELDS[importance][0], sums.double())
                setattr(observer, FIELDS[importance][1], torch.tensor(5))
            return observer

        weight = layer().weight
        with pytest.raises(ImportanceError, match=rf"^Observer 'optimal' \(weight\): {reason}"):
            with_sums(strict=True)(weight)
        observer = with_sums()
        with pytest.warns(CalipersWarning, match=reason) as caught:
            observer(weight)
        assert len(caught) == 1
        expected = build()(weight).get_qparams()["scale"]
        assert torch.equal(observer.get_qparams()["scale"], expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            observer(weight)  # said once

    def test_nan_off_the_diagonal(self) -> None:
        observer = build(importance="hessian", strict=True)
        observer._hessian_sum = torch.eye(16).repeat(4, 1, 1).double()
        observer._hessian_sum[1, 2, 3] = torch.nan
        observer._hessian_count = torch.tensor(5)
        with pytest.raises(ImportanceError, match="the Hessian has NaN or Inf in it"):
            observer(layer().weight)

    def test_unknown_importance(self) -> None:
        with pytest.raises(ConfigurationError) as caught:
            build(importance="awq")
        assert "'none', 'imatrix' or 'hessian'" in str(caught.value)
        assert "optimal" in str(caught.value)

    @pytest.mark.parametrize("shortlist", [0, 257])
    def test_shortlist(self, shortlist: int) -> None:
        with pytest.raises(ConfigurationError, match="shortlist"):
            build(shortlist=shortlist)

    def test_activations(self) -> None:
        with pytest.raises(ConfigurationError, match="use 'histogram_mse'"):
            Observer.load_from_registry("optimal", base_name="input", args=INT4)


# Little data, or none


@pytest.mark.parametrize(
    ("args", "importance", "dtype"),
    pairwise(
        [INT4, arguments("channel", "int4_asym"), nvfp4(16), SCALES["mxfp4"]], [*FIELDS], DTYPES
    ),
    ids=str,
)
class TestScarcity:
    def check(self, linear: Any, observer: Observer) -> None:
        """Scales are finite, and even what does not count is not ruined."""
        qparams = observer(linear.weight).get_qparams()
        assert bool(torch.isfinite(qparams["scale"].float()).all())
        assert bool((qparams["scale"].float() > 0).all())
        weight = linear.weight.double()
        difference = rounded(weight, qparams, observer.args) - weight
        assert float(difference.norm()) <= 0.5 * float(weight.norm())

    def test_idle_channels(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        linear, x = layer(dtype=dtype), inputs()
        x[:, ::3] = 0
        self.check(linear, gathered(linear, x, args, importance=importance, strict=True))

    def test_idle_groups(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        linear, x = layer(dtype=dtype), inputs()
        x[:, :32] = 0
        self.check(linear, gathered(linear, x, args, importance=importance, strict=True))

    def test_one_token(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        linear = layer(dtype=dtype)
        observer = gathered(linear, inputs(1), args, importance=importance, strict=True)
        self.check(linear, observer)

    def test_zeros(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        """They take what min-max gives them."""
        linear = layer(dtype=dtype)
        linear.weight[0] = 0
        linear.weight[1, :32] = 0
        observer = gathered(linear, inputs(), args, importance=importance, strict=True)
        self.check(linear, observer)
        linear.weight.zero_()
        ours = observer(linear.weight).get_qparams()
        minmax = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
        theirs = minmax(linear.weight).get_qparams()
        assert torch.equal(ours["scale"].float(), theirs["scale"].float())
        assert torch.equal(ours["zero_point"].float(), theirs["zero_point"].float())

    def test_denormals(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        linear = layer(dtype=dtype)
        linear.weight.copy_(draw("denormals", (4, COLUMNS), dtype))
        qparams = gathered(linear, inputs(), args, importance=importance)(linear.weight)
        assert bool(torch.isfinite(qparams.get_qparams()["scale"].float()).all())
        assert bool((qparams.get_qparams()["scale"].float() > 0).all())


@pytest.mark.parametrize("importance", FIELDS)
def test_the_weights_of_idle_channels_get_the_scale_they_would_get_alone(importance: str) -> None:
    linear, x = layer(), inputs()
    x[:, :16] = 0  # the first group of every row
    scale = gathered(linear, x, importance=importance)(linear.weight).get_qparams()["scale"]
    plain = build()(linear.weight).get_qparams()["scale"]
    assert torch.equal(scale[:, 0], plain[:, 0])
    assert not torch.equal(scale, plain)
