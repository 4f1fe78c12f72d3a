"""How a tensor is observed is resolved once, and without an observer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from laws import FOR_INPUTS, PROMISES

from calipers.errors import CalipersError, CodeNotAllowedError
from calipers.observers import Observer, ObserverSpec
from calipers.observers.definition import Definition
from calipers.statistics.ranges import Extrema

INT8 = QuantizationArgs(num_bits=8)


def args_of(name: str | None, **options: Any) -> QuantizationArgs:
    return QuantizationArgs(num_bits=8, observer=name, observer_kwargs=options)


def resolved(base_name: str, args: QuantizationArgs) -> ObserverSpec:
    spec = ObserverSpec.resolve(base_name, args)
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", FOR_INPUTS)
def test_what_is_built_is_what_was_resolved(name: str) -> None:
    spec = resolved("input", args_of(name, nonfinite="ignore"))
    observer = spec.build("mlp.up_proj")
    assert (spec.name, type(observer)) == (name, spec.kind)
    assert observer.options == spec.options
    assert observer.label() == f"Observer '{name}' (input of mlp.up_proj)"
    assert spec.counts_values is (observer.counts is not None)
    assert spec.options_given == {"nonfinite": "ignore"}


@pytest.mark.parametrize("base_name", ["weight", "input"])
def test_nothing_is_built(base_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *_: object, **__: object) -> None:
        pytest.fail(f"{type(self).__name__} was built")

    monkeypatch.setattr(Observer, "__init__", refuse)
    for name in FOR_INPUTS if base_name == "input" else PROMISES:
        ObserverSpec.resolve(base_name, args_of(name))


@pytest.mark.parametrize(
    ("base_name", "given", "name"),
    [
        ("weight", None, "memoryless_minmax"),
        ("input", None, "static_minmax"),
        ("k", None, "static_minmax"),
        ("weight", "minmax", "memoryless_minmax"),
        ("weight", "static-minmax", "memoryless_minmax"),
        ("weight", "MSE", "memoryless_mse"),
        ("output", "MSE", "mse"),
        ("weight", "fouroversix", "nvfp4_expanded_mse"),
    ],
)
def test_weights_are_seen_once(base_name: str, given: str | None, name: str) -> None:
    assert resolved(base_name, args_of(given)).name == name


def test_a_weight_has_no_use_for_an_averaging_constant() -> None:
    given = args_of("mse", averaging_constant=0.5, norm=2.0)
    assert resolved("weight", given).options_given == {"norm": 2.0}
    assert resolved("input", given).options_given == {"norm": 2.0, "averaging_constant": 0.5}
    assert given.observer_kwargs == {"norm": 2.0, "averaging_constant": 0.5}


def test_scales_that_are_found_while_the_model_runs() -> None:
    assert ObserverSpec.resolve("input", QuantizationArgs(num_bits=8, dynamic=True)) is None


@pytest.mark.parametrize(
    ("name", "options", "importance", "fields"),
    [
        ("memoryless_mse", {}, "none", ()),
        ("imatrix_mse", {}, "imatrix", ("_imatrix_sum", "_imatrix_count")),
        ("optimal", {}, "imatrix", ("_imatrix_sum", "_imatrix_count")),
        ("optimal", {"importance": "none"}, "none", ()),
        ("optimal", {"importance": "hessian"}, "hessian", ("_hessian_sum", "_hessian_count")),
    ],
)
def test_what_must_be_known_of_inputs(
    name: str, options: dict[str, Any], importance: str, fields: tuple[str, ...]
) -> None:
    spec = resolved("weight", args_of(name, nonfinite="ignore", **options))
    assert (spec.importance.name, spec.importance.fields) == (importance, fields)
    statistic = spec.importance.statistic(64, spec.args)
    assert (statistic is None) is not fields
    if statistic is not None:
        assert tuple(statistic.declared()) == fields
        assert statistic.configuration()["nonfinite"] == "ignore"
    observer = spec.build()
    assert observer.gathering.importance == spec.importance
    assert (observer.inputs is None) is (statistic is None)


def test_only_weights_have_importance() -> None:
    assert resolved("input", args_of("imatrix_mse")).importance.name == "none"


NOT_SUITED = [
    ("input", {"observer": "optimal"}),
    ("weight", {"observer": "optimal", "type": "float", "observer_kwargs": {"signed_scale": True}}),
    ("input", {"observer": "percentile", "strategy": "group", "group_size": 8}),
    ("input", {"observer": "entropy", "num_bits": 4}),
    ("input", {"observer": "mse", "observer_kwargs": {"patence": 3}}),
    ("input", {"observer": "mse", "observer_kwargs": {"patience": -3, "grid": 0}}),
    ("input", {"num_bits": 16}),
    ("weihgt", {}),
    ("input", {"observer": "mixmax"}),
]


@pytest.mark.parametrize(("base_name", "given"), NOT_SUITED)
def test_is_refused_as_by_the_constructor(base_name: str, given: dict[str, Any]) -> None:
    args = QuantizationArgs(**{"num_bits": 8, **given})
    with pytest.raises(CalipersError) as by_constructor:
        Observer.load_from_registry(args.observer or "minmax", base_name=base_name, args=args)
    with pytest.raises(type(by_constructor.value)) as caught:
        ObserverSpec.resolve(base_name, args)
    assert str(caught.value) == str(by_constructor.value)


def test_is_frozen_and_hashable() -> None:
    args = args_of("mse", norm=2.0)
    spec, same = (resolved("input", args) for _ in range(2))
    assert spec == same
    assert len({spec, same}) == 1
    for other in (
        resolved("output", args),
        resolved("input", args_of("mse")),
        resolved("input", args_of("minmax")),
        resolved("input", args.model_copy(update={"num_bits": 4})),
    ):
        assert other != spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.base_name = "output"  # type: ignore[misc]
    args.observer_kwargs["norm"] = 7.0
    assert spec.build().options.norm == 2.0


def test_a_class_may_read_its_options_itself() -> None:
    @Observer.register("reads_factor")
    class Reads(Observer):
        def __init__(self, quantization_args: QuantizationArgs, factor: float = 1.0) -> None:
            super().__init__(quantization_args=quantization_args)
            self.factor = factor

        def calculate_qparams(self, observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return observed.max().reshape(1) * self.factor, torch.zeros(1)

    built = resolved("input", args_of("reads_factor", factor=3.0)).build("up")
    assert (built.base_name, built.factor, built.module_name) == ("input", 3.0, "up")
    assert built(torch.ones(1, 2)).get_qparams()["scale"] == 3


def test_code_runs_only_if_it_may(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from calipers.observers import MinMaxObserver\nclass Own(MinMaxObserver): pass\n"
    )
    args = args_of(f"{file}:Own")
    with pytest.raises(CodeNotAllowedError):
        ObserverSpec.resolve("input", args)
    spec = ObserverSpec.resolve("input", args, allow_code=True)
    assert spec is not None
    assert spec.name == "Own"
    assert ObserverSpec.resolve("input", args) == spec  # it is loaded already


@pytest.mark.parametrize(
    ("name", "suited"),
    [
        ("memoryless_minmax", ["weight", "input", "output", "q", "k", "v"]),
        ("imatrix_mse", ["weight"]),
        ("optimal", ["weight"]),
        ("entropy", ["weight", "input", "output", "q", "k", "v"]),
    ],
)
def test_what_an_observer_is_made_for(name: str, suited: list[str]) -> None:
    kind = Observer.get_value_from_registry(name)
    everything = ("weight", "input", "output", "q", "k", "v")
    assert [base_name for base_name in everything if kind.suits(base_name, INT8)] == suited


def test_what_stands_for_an_observer_of_streams_is_its_definition_not_its_name() -> None:
    class OfOneTensor(Observer):
        definition = Definition(ignores=("pace",))

    class OfAStream(Observer):
        definition = Definition(Extrema, for_weights=OfOneTensor)

    for kind in (OfOneTensor, OfAStream):
        Observer.register_value(kind, f"test_spec_{kind.__name__}")
    args = args_of("test_spec_OfAStream", pace=2, depth=3)
    weight, stream = resolved("weight", args), resolved("input", args)
    assert (weight.kind, weight.options_given) == (OfOneTensor, {"depth": 3})
    assert (stream.kind, stream.options_given) == (OfAStream, {"pace": 2, "depth": 3})
    assert weight.takes_extrema
    assert not resolved("weight", args_of("mse")).takes_extrema
    assert not resolved("weight", args_of("optimal")).takes_extrema
