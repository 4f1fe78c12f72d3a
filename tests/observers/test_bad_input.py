"""What bad input gets: each case its own message, tested as text."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from laws import FOR_INPUTS

from calipers import errors
from calipers.observers import (
    Observer,
)

INT4 = QuantizationArgs(num_bits=4, group_size=4)
INT8 = QuantizationArgs(num_bits=8)
build = Observer.load_from_registry


class TestBadInput:
    def test_unknown_observer(self) -> None:
        with pytest.raises(errors.UnknownObserverError) as caught:
            build("minmaxx", args=INT4)
        assert str(caught.value) == (
            "unknown observer 'minmaxx'. Did you mean 'minmax'? Allowed: "
            f"{', '.join(Observer.registered_names())}. "
            "A class of your own is given as 'path/to/file.py:Class'."
        )
        assert isinstance(caught.value, KeyError)

    def test_no_observer(self) -> None:
        with pytest.raises(errors.UnknownObserverError, match="unknown observer 'None'"):
            build(QuantizationArgs().observer, args=INT4)

    def test_errors_of_the_layout_name_the_observer(self) -> None:
        observer = build("minmax", args=INT4)
        observer.module_name = "lm_head"
        with pytest.raises(errors.LayoutError, match=r"^Observer 'minmax' \(weight of lm_head"):
            observer(torch.ones(2, 6))

    def test_a_range_without_a_scale_names_the_observer(self) -> None:
        observer = build("static_minmax", args=INT8)(torch.ones(2, 2))
        observer.max_vals = torch.tensor([math.nan])
        with pytest.raises(errors.TensorValueError, match=r"^Observer 'static_minmax' \(weight"):
            observer.get_qparams()

    def test_unknown_option(self) -> None:
        with pytest.raises(errors.ConfigurationError) as caught:
            build("mse", args=INT4, maxshrnk=0.1)
        assert str(caught.value) == (
            "Unknown option 'maxshrnk' for observer 'mse'. Did you mean 'maxshrink'? Allowed: "
            "averaging_constant, expand, grid, maxshrink, nonfinite, norm, patience."
        )
        args = QuantizationArgs(num_bits=4, observer_kwargs={"averaging_constant": 0.5})
        with pytest.raises(errors.ConfigurationError, match="for observer 'static_minmax'"):
            build("static_minmax", args=args)

    @pytest.mark.parametrize(
        ("option", "value", "demand"),
        [
            ("grid", 0, "grid must be > 0, got 0.0"),
            ("grid", -1, "grid must be > 0, got -1.0"),
            ("patience", -1, "patience must be >= 0, got -1"),
            ("maxshrink", 1.5, "maxshrink must be in [0, 1], got 1.5"),
            ("maxshrink", -0.1, "maxshrink must be in [0, 1], got -0.1"),
            ("norm", 0, "norm must be a finite positive number, got 0.0"),
            ("norm", math.inf, "norm must be a finite positive number, got inf"),
            ("norm", math.nan, "norm must be a finite positive number, got nan"),
            (
                "norm",
                "two",
                "norm must be a valid number, unable to parse string as a number, got 'two'",
            ),
            ("expand", 0.9, "expand must be at least 1, got 0.9"),
            ("averaging_constant", 0, "averaging_constant must be in (0, 1], got 0.0"),
            ("averaging_constant", 2, "averaging_constant must be in (0, 1], got 2.0"),
            ("nonfinite", "drop", "nonfinite must be 'raise' or 'ignore', got 'drop'"),
        ],
    )
    def test_option_out_of_range(self, option: str, value: object, demand: str) -> None:
        with pytest.raises(errors.ConfigurationError) as caught:
            build("mse", args=INT4, **{option: value})
        assert str(caught.value) == f"Observer 'mse': {demand}."
        assert isinstance(caught.value, ValueError)

    def test_several_problems_are_told_at_once(self) -> None:
        with pytest.raises(errors.ConfigurationError) as caught:
            build("mse", args=INT4, grid=-1, patience=-1)
        assert str(caught.value) == (
            "Observer 'mse': patience must be >= 0, got -1; grid must be > 0, got -1.0."
        )

    def test_unknown_base_name(self) -> None:
        with pytest.raises(errors.ConfigurationError, match="Unknown base_name 'bias'"):
            build("minmax", base_name="bias", args=INT4)

    def test_unsupported_format(self) -> None:
        with pytest.raises(errors.ConfigurationError, match="int with 16 bits"):
            build("minmax", args=QuantizationArgs(num_bits=16))

    def test_strategy_that_does_not_suit(self) -> None:
        observer = build("minmax", base_name="input", args=QuantizationArgs(strategy="channel"))
        with pytest.raises(errors.LayoutError, match="'channel' cannot be applied to 'input'"):
            observer(torch.zeros(2, 4))

    def test_group_that_does_not_divide(self) -> None:
        with pytest.raises(errors.LayoutError, match="6 is not divisible by 4"):
            build("minmax", args=INT4)(torch.zeros(2, 6))

    def test_complex(self) -> None:
        with pytest.raises(errors.TensorKindError) as caught:
            build("minmax", args=INT4)(torch.zeros(2, 4, dtype=torch.complex64))
        assert str(caught.value) == (
            "Observer 'minmax' (weight) was given a complex tensor (torch.complex64). Observe its "
            "real and imaginary parts separately, or exclude the module."
        )

    @pytest.mark.parametrize("name", FOR_INPUTS)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_nonfinite(self, name: str, bad: float) -> None:
        observer = build(name, base_name="input", args=INT8)
        observer.module_name = "model.layers.3.mlp.down_proj"
        value = torch.randn(2, 3, 8)
        value[0, 1, 2] = value[1, 2, 3] = bad
        with pytest.raises(errors.TensorValueError) as caught:
            observer(value)
        assert str(caught.value) == (
            f"Observer '{name}' (input of model.layers.3.mlp.down_proj) was given 2 non-finite "
            "values (NaN or Inf) among 48, in a tensor of shape (2, 3, 8). Nothing was recorded. "
            'Find out where they come from, or pass nonfinite="ignore" to leave them out and '
            "count them."
        )
        assert not observer.fields()

    def test_no_statistics(self) -> None:
        for ask in (Observer.get_qparams, Observer.get_statistics, list):
            with pytest.raises(errors.NoStatisticsError) as caught:
                ask(build("minmax", args=INT4))
            assert str(caught.value) == "No statistics available. Call observer(value) first."
            assert isinstance(caught.value, AssertionError)
        named = build("minmax", args=INT4)
        named.module_name = "experts.7.w1"
        with pytest.raises(errors.NoStatisticsError, match=r"Nothing reached experts\.7\.w1"):
            named.get_qparams()

    def test_shape_that_changes(self) -> None:
        observer = build("static_minmax", args=INT4)(torch.ones(2, 8))
        kept = observer.min_vals.clone()
        with pytest.raises(errors.DataError) as caught:
            observer(torch.ones(2, 12))
        assert str(caught.value) == (
            "Observer 'static_minmax' (weight) has seen tensors with min_vals of shape (2, 2), and "
            "now one of shape (2, 3). One observer watches one tensor: use another one, or reset() "
            "this one."
        )
        assert torch.equal(observer.min_vals, kept)

    def test_merge_of_different_configurations_shows_both(self) -> None:
        one = build("static_minmax", base_name="input", args=QuantizationArgs(num_bits=8))
        other = build("static_minmax", base_name="output", args=QuantizationArgs(num_bits=4))
        with pytest.raises(errors.MergeError) as caught:
            one(torch.ones(2, 2)).merge(other(torch.ones(2, 2)))
        assert str(caught.value) == (
            "Cannot merge into Observer 'static_minmax' (input): the configurations differ.\n"
            "  args.num_bits: 8 here, 4 there\n"
            "  base_name: 'input' here, 'output' there"
        )

    def test_merge_of_different_options(self) -> None:
        strict = build("static_minmax", args=INT4)(torch.ones(2, 8))
        lax = build("static_minmax", args=INT4, nonfinite="ignore")(torch.ones(2, 8))
        with pytest.raises(errors.MergeError, match=r"options\.nonfinite: 'raise' here, 'ignore'"):
            strict.merge(lax)

    def test_merge_of_different_shapes(self) -> None:
        one, other = (build("static_minmax", args=INT4)(torch.ones(n, 8)) for n in (2, 3))
        with pytest.raises(errors.DataError, match=r"shape \(2, 2\).* one of shape \(3, 2\)"):
            one.merge(other)

    def test_merge_of_something_else(self) -> None:
        with pytest.raises(errors.MergeError, match="Cannot merge a dict into Observer 'minmax'"):
            build("minmax", args=INT4).merge({})

    def test_merge_of_what_forgets(self) -> None:
        one, other = (build("minmax", args=INT4)(torch.ones(2, 8)) for _ in range(2))
        with pytest.raises(errors.MergeError) as caught:
            one.merge(other)
        assert str(caught.value) == (
            "Observer 'minmax' (weight) cannot merge: what it keeps depends on the order of the "
            "data: min_vals (moving average), max_vals (moving average). "
            "Use a statistic with memory of all data, such as 'static_minmax'."
        )

    def test_state_of_another_configuration(self) -> None:
        saved = build("static_minmax", args=INT4)(torch.ones(2, 8)).state_dict()
        other = build("static_minmax", args=QuantizationArgs(num_bits=4, group_size=8))
        with pytest.raises(errors.MergeError, match=r"args\.group_size: 8 here, 4"):
            other.load_state_dict(saved)
        assert not other.has_statistics

    def test_every_error_has_an_exit_code(self) -> None:
        classes = [c for c in vars(errors).values() if isinstance(c, type)]
        own = [c for c in classes if issubclass(c, errors.CalipersError)]
        assert len(own) > 15
        assert all(isinstance(c.exit_code, int) and c.exit_code > 0 for c in own)
