"""Building observers: both keyword styles, options, defaults."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationArgs

from calipers import errors
from calipers.observers import (
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    NVFP4ExpandedMSEObserver,
    Observer,
    StaticMinMaxObserver,
)

INT4 = QuantizationArgs(num_bits=4, group_size=4)
INT8 = QuantizationArgs(num_bits=8)
build = Observer.load_from_registry

CLASSES = {
    "memoryless_minmax": MemorylessMinMaxObserver,
    "static_minmax": StaticMinMaxObserver,
    "minmax": MinMaxObserver,
    "memoryless_mse": MemorylessMSEObserver,
    "mse": MovingAverageMSEObserver,
    "nvfp4_expanded_mse": NVFP4ExpandedMSEObserver,
    "imatrix_mse": IMatrixMSEObserver,
}

DEFAULTS = {
    "memoryless_minmax": {},
    "static_minmax": {},
    "minmax": {"averaging_constant": 0.01},
    "memoryless_mse": {"maxshrink": 0.2, "patience": 5, "grid": 100, "norm": 2.4, "expand": 1},
    "mse": {
        "maxshrink": 0.2,
        "patience": 5,
        "grid": 100,
        "norm": 2.4,
        "expand": 1,
        "averaging_constant": 0.01,
    },
    "nvfp4_expanded_mse": {
        "maxshrink": 1 - 0.8 / 1.8,
        "patience": 1000,
        "grid": 200,
        "norm": 2.4,
        "expand": 1.8,
    },
    "imatrix_mse": {
        "maxshrink": 0.95,
        "patience": 5,
        "grid": 20,
        "norm": 3,
        "expand": 1,
        "strict": False,
    },
}


class TestConstruction:
    @pytest.mark.parametrize("name", CLASSES)
    def test_both_styles_and_all_spellings(self, name: str) -> None:
        current = build(name, base_name="input", args=INT8)
        first = build(name.upper().replace("_", "-"), quantization_args=INT8)
        assert type(current) is type(first) is CLASSES[name]
        assert (current.base_name, first.base_name) == ("input", "weight")
        assert type(CLASSES[name]("k", INT8)) is CLASSES[name]
        assert CLASSES[name](INT8).base_name == "weight"
        assert current.args.num_bits == first.args.num_bits == 8

    @pytest.mark.parametrize("name", CLASSES)
    def test_published_defaults(self, name: str) -> None:
        observer = build(name, base_name="weight", args=INT4)
        assert observer.options.model_dump() == {"nonfinite": "raise", **DEFAULTS[name]}

    def test_options_of_the_call_win_and_args_stay(self) -> None:
        args = QuantizationArgs(num_bits=4, observer_kwargs={"norm": 3.0, "patience": 7})
        observer = build("mse", base_name="weight", args=args, norm=1.5)
        assert (observer.options.norm, observer.options.patience) == (1.5, 7)
        assert args.observer_kwargs == {"norm": 3.0, "patience": 7}
        assert observer.args.observer_kwargs == {"norm": 1.5, "patience": 7}

    def test_args_are_shared_with_nobody(self) -> None:
        args = QuantizationArgs(num_bits=8, strategy="block", block_structure=[2, 2])
        observer = build("minmax", args=args)
        observer.args.block_structure[0] = 4
        assert args.block_structure == [2, 2]

    def test_options_are_attributes_that_check_what_is_set(self) -> None:
        observer = build("mse", base_name="weight", args=INT4)
        assert observer.patience == 5
        observer.patience = 9
        assert observer.options.patience == 9
        with pytest.raises(
            errors.ConfigurationError, match="Observer 'mse': patience must be >= 0, got -2"
        ):
            observer.patience = -2
        assert observer.options.patience == 9

    def test_args_are_needed_once(self) -> None:
        message = "Observer 'minmax' needs QuantizationArgs, given once"
        with pytest.raises(errors.ConfigurationError, match=message):
            build("minmax", base_name="weight")
        with pytest.raises(errors.ConfigurationError, match=message):
            build("minmax", args=INT4, quantization_args=INT4)
        with pytest.raises(errors.ConfigurationError, match=message):
            build("minmax", args={"num_bits": 4})

    def test_options_are_not_positional(self) -> None:
        with pytest.raises(errors.ConfigurationError, match="give its options by keyword"):
            MinMaxObserver(INT8, 0.5)

    def test_printed_in_a_model(self) -> None:
        text = repr(build("minmax", base_name="weight", args=INT4))
        assert text == (
            "MinMaxObserver(weight, int4 per group, nonfinite=raise, averaging_constant=0.01)"
        )
