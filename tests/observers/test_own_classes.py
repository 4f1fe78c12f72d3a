"""Subclasses as people have written them for each generation of the API."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from torch import distributed as dist

from calipers.errors import ConfigurationError
from calipers.observers import (
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MovingAverageMSEObserver,
    Observer,
    OptimalObserver,
)
from calipers.observers.options import ObserverOptions

INT4 = QuantizationArgs(num_bits=4, group_size=4)
INT8 = QuantizationArgs(num_bits=8)
build = Observer.load_from_registry


class TestOwnClasses:
    def test_current_generation(self) -> None:
        class Halved(Observer):
            def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
                self.factor = self.args.observer_kwargs.get("factor", 0.5)
                self.min_vals = observed.amin((0, -1)) * self.factor
                self.max_vals = observed.amax((0, -1)) * self.factor

        x = torch.randn(2, 8)
        expected = calculate_qparams(
            *(v * 0.25 for v in torch.aminmax(x.view(2, 2, 4), dim=-1)), INT4
        )
        scale, zero_point = Halved("weight", INT4, factor=0.25)(x)
        assert torch.equal(scale, expected[0])
        assert torch.equal(zero_point, expected[1])

    def test_options_that_are_no_json_can_be_saved(self) -> None:
        class Plain(Observer):
            def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
                self.min_vals, self.max_vals = self.extrema(observed)

        observer = Plain("weight", INT4, device=torch.device("cpu"))(torch.ones(1, 4))
        again = Plain("weight", INT4, device=torch.device("cpu"))
        again.load_state_dict(observer.state_dict())
        assert torch.equal(again.max_vals, observer.max_vals)

    def test_act_sync_dict_is_honoured(self) -> None:
        class Own(Observer):
            _act_sync_dict = {  # noqa: RUF012
                "min_vals": dist.ReduceOp.MIN,
                "max_vals": dist.ReduceOp.MAX,
                "batches": dist.ReduceOp.SUM,
            }

            def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
                low, high = observed.amin((0, -1)), observed.amax((0, -1))
                if hasattr(self, "min_vals"):
                    low, high = torch.min(low, self.min_vals), torch.max(high, self.max_vals)
                self.min_vals, self.max_vals = low, high
                self.batches = getattr(self, "batches", torch.tensor(0)) + 1

        one = Own("input", INT8)(torch.tensor([[1.0, 2.0]]))
        other = Own("input", INT8)(torch.tensor([[-5.0, 1.0]]))(torch.tensor([[0.0, 7.0]]))
        one.merge(other)
        assert (one.min_vals.item(), one.max_vals.item(), one.batches.item()) == (-5, 7, 3)
        assert set(one.get_statistics()) == {"min_vals", "max_vals", "batches"}

    @pytest.mark.parametrize("args", [INT8, INT4, QuantizationArgs(num_bits=8, strategy="channel")])
    def test_first_generation_piece_by_piece(self, args: QuantizationArgs) -> None:
        class Whole(Observer):
            def calculate_qparams(
                self, observed: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return calculate_qparams(observed.min(), observed.max(), INT8)

        x = torch.randn(3, 8)
        expected = build("memoryless_minmax", args=args)(x)
        low, high = expected.get_range()
        scale, zero_point = Whole(quantization_args=args)(x)
        assert torch.equal(scale, calculate_qparams(low, high, INT8)[0])
        assert scale.shape == zero_point.shape == low.shape

    def test_first_generation_with_dimensions_and_names(self) -> None:
        calls: list[object] = []

        class Reducing(Observer):
            def calculate_qparams(self, observed, reduce_dims=None, tensor_id=None):  # type: ignore[no-untyped-def]
                calls.append((reduce_dims, tensor_id))
                low = observed.amin(reduce_dims, keepdim=True) if reduce_dims else observed.min()
                high = observed.amax(reduce_dims, keepdim=True) if reduce_dims else observed.max()
                return calculate_qparams(low, high, self.args)

        x = torch.randn(3, 8)
        scale, _ = Reducing(quantization_args=INT4)(x)
        assert torch.equal(scale, build("memoryless_minmax", args=INT4)(x).get_qparams()["scale"])
        assert calls == [((0, 3), None)]

        class Named(Observer):
            def calculate_qparams(self, observed, tensor_id=None):  # type: ignore[no-untyped-def]
                calls.append(tensor_id)
                return calculate_qparams(observed.min(), observed.max(), self.args)

        calls.clear()
        Named(quantization_args=INT4)(x)
        assert calls == list(range(6))

    def test_first_generation_with_any_keyword(self) -> None:
        class Lax(Observer):
            def calculate_qparams(self, observed, **kwargs):  # type: ignore[no-untyped-def]
                assert not kwargs
                return calculate_qparams(observed.min(), observed.max(), self.args)

        x = torch.randn(3, 8)
        scale, _ = Lax(quantization_args=INT4)(x)
        assert torch.equal(scale, build("memoryless_minmax", args=INT4)(x).get_qparams()["scale"])

    def test_first_generation_with_the_wrong_number_of_scales(self) -> None:
        class Wrong(Observer):
            def calculate_qparams(self, observed, reduce_dims=None):  # type: ignore[no-untyped-def]
                assert reduce_dims == (0, 3)
                return observed.max().reshape(1), torch.zeros(1)

        with pytest.raises(ConfigurationError, match=r"returned 1 scales .* where 6 are needed"):
            Wrong(quantization_args=INT4)(torch.randn(3, 8))

    def test_first_generation_results_are_copies(self) -> None:
        class Own(Observer):
            def calculate_qparams(
                self, observed: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return observed.max().reshape(1), torch.zeros(1)

        observer = Own(quantization_args=INT8)(torch.ones(2, 2))
        observer.get_qparams()["scale"].mul_(7)
        assert observer.get_qparams()["scale"] == 1

    def test_fields_that_begin_as_none(self) -> None:
        class Summing(Observer):
            _act_sync_dict = {"total": dist.ReduceOp.SUM}  # noqa: RUF012

            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)
                self.total = None

            def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
                self.min_vals, self.max_vals = self.extrema(observed)
                self.total = observed.sum() if self.total is None else self.total + observed.sum()

        observer = Summing("input", INT8).to("cpu")
        for _ in range(2):
            observer(torch.ones(1, 2))(torch.ones(1, 2))
            assert observer.total.item() == 4
            observer.reset()
            assert observer.total is None
        assert not observer.state_dict().keys() - {"_extra_state"}

    def test_the_fields_name_for_the_averaging_constant(self) -> None:
        class Quick(MovingAverageMSEObserver):
            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)
                self.avg_constant = 0.5

        observer = Quick("input", INT8)
        assert observer.options.averaging_constant == observer.avg_constant == 0.5

    def test_first_generation_options(self) -> None:
        @Observer.register("scaled_once")
        class Scaled(Observer):
            def __init__(self, quantization_args: QuantizationArgs, factor: float = 1.0) -> None:
                super().__init__(quantization_args=quantization_args)
                self.factor = factor

            def calculate_qparams(
                self, observed: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return observed.max().reshape(1) * self.factor, torch.zeros(1, dtype=torch.int8)

        args = QuantizationArgs(num_bits=8, observer_kwargs={"factor": 3.0})
        x = torch.ones(2, 2)
        assert build("scaled_once", quantization_args=args)(x).get_qparams()["scale"] == 3
        assert next(iter(build("scaled_once", quantization_args=args, factor=2.0)(x))) == 2
        current = build("scaled_once", base_name="input", args=args)
        assert current.base_name == "input"
        assert current(x).get_qparams()["scale"] == 3

    def test_a_class_that_implements_nothing_says_so(self) -> None:
        class Nothing(Observer):
            pass

        with pytest.raises(NotImplementedError, match="Nothing must implement update_statistics"):
            Nothing("weight", INT8)(torch.ones(2, 2))

    def test_a_subclass_can_redefine_options_as_the_field_does(self) -> None:
        class Wide(MemorylessMSEObserver):
            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)
                self.expand = self.args.observer_kwargs.get("expand", 1.8)

        assert Wide("weight", INT4).options.expand == 1.8
        assert Wide("weight", INT4, expand=1.5).options.expand == 1.5


BLOCK = QuantizationArgs(num_bits=8, strategy="block", block_structure=[2, 4])


class TestClassesThatBuildOnOurs:
    """They get the canonical view, as ours do not need to."""

    def observe(self, kind: type[Observer], first: float = 0.0) -> Observer:
        weight = torch.arange(32.0).reshape(4, 8)
        weight[0, 0] = first
        return kind(base_name="weight", args=BLOCK, nonfinite="ignore")(weight)

    def test_extrema_of_their_own(self) -> None:
        class Clipping(MemorylessMSEObserver):
            def extrema(self, observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                assert observed.shape == (1, 2, 2, 8)
                return observed.amin((0, -1)) * 0.9, observed.amax((0, -1)) * 0.9

        expected = self.observe(Clipping).get_qparams()["scale"]
        assert expected.shape == (2, 2)
        for strange in (math.nan, math.inf, -math.inf):
            assert torch.equal(self.observe(Clipping, strange).get_qparams()["scale"], expected)

    def test_an_update_of_their_own_that_calls_ours(self) -> None:
        class Widened(MemorylessMinMaxObserver):
            def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
                assert observed.shape == (1, 2, 2, 8)
                super().update_statistics_from_observed(observed)
                self.max_vals = self.max_vals * 2

        assert self.observe(Widened).max_vals.tolist() == [[22.0, 30.0], [54.0, 62.0]]

    def test_a_wrapped_update(self) -> None:
        class Wrapped(MemorylessMinMaxObserver):
            @functools.wraps(MemorylessMinMaxObserver.update_statistics_from_observed)
            def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
                assert observed.shape == (1, 2, 2, 8)
                self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))

        assert self.observe(Wrapped).max_vals.tolist() == [[11.0, 15.0], [27.0, 31.0]]


def test_few_classes_stand_behind_an_observer() -> None:
    ours = [kind for kind in OptimalObserver.__mro__ if kind.__module__.startswith("calipers.")]
    assert len(ours) <= 4, ours
    hooks = [vars(kind).keys() & {"__getattr__", "__setattr__"} for kind in ours]
    assert sum("__getattr__" in each for each in hooks) <= 2
    assert sum("__setattr__" in each for each in hooks) <= 1


def test_an_option_of_the_base_is_an_attribute_where_options_are_others() -> None:
    class Own(MemorylessMSEObserver):
        Options = ObserverOptions

        def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
            self.grid = 3
            self.min_vals, self.max_vals = self.extrema(observed)

    observer = Own("weight", INT4)
    assert not hasattr(observer, "grid")
    assert observer(torch.ones(1, 4)).grid == 3
    assert MemorylessMSEObserver("weight", INT4).grid == 100
