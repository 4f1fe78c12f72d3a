"""The life of one module, step by step and by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compressed_tensors.offload import offload_module
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
    initialize_module_for_quantization,
    preset_name_to_scheme,
)
from torch import Tensor, nn

from calipers.calibration.lifecycle import (
    OBSERVED,
    calibrate_input_hook,
    calibrate_key_hook,
    calibrate_output_hook,
    calibrate_query_hook,
    calibrate_value_hook,
    freeze_module_quantization,
    initialize_observer,
    observe,
    observer_of,
    update_qparams,
)
from calipers.errors import ConfigurationError, NoStatisticsError, TensorValueError
from calipers.numerics.tensors import token_mask

STATIC = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False)
CHANNEL = QuantizationArgs(num_bits=8, strategy="channel")


def scheme(**args: QuantizationArgs) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], **args)


def linear(**args: QuantizationArgs) -> nn.Linear:
    """A Linear with parameters to be set; it does not quantize before they are."""
    module = nn.Linear(4, 3)
    initialize_module_for_quantization(module, scheme(**args))
    module.quantization_enabled = False
    return module


def int8_scale(*tensors: Tensor) -> Tensor:
    """The scale of symmetric int8, from its definition."""
    return max(tensor.abs().max() for tensor in tensors) / 127.5


# Observers


@pytest.mark.parametrize("base_name", OBSERVED)
def test_observers_have_the_name_of_their_tensor(base_name: str) -> None:
    module = nn.Linear(4, 3)
    module.quantization_scheme = scheme(
        weights=STATIC, input_activations=STATIC, output_activations=STATIC
    )
    initialize_observer(module, base_name, name="layers.0.up_proj")
    observer = module.get_submodule(f"{base_name}_observer")
    assert observer is observer_of(module, base_name)
    assert observer.base_name == base_name
    assert [name for name, _ in module.named_children()] == [f"{base_name}_observer"]
    name = "memoryless_minmax" if base_name == "weight" else "static_minmax"
    assert observer.label() == f"Observer '{name}' ({base_name} of layers.0.up_proj)"


def test_the_first_generation_is_called_without_a_name() -> None:
    module = linear(input_activations=STATIC)
    initialize_observer(module, "input")
    assert observer_of(module, "input").label() == "Observer 'static_minmax' (input)"


def test_without_a_scheme_nothing_happens() -> None:
    module = nn.Linear(4, 3)
    before = set(vars(module))
    for base_name in OBSERVED:
        initialize_observer(module, base_name)
        observe(module, base_name)
        update_qparams(module, base_name)
    module.apply(freeze_module_quantization)
    assert set(vars(module)) == before
    assert not list(module.children())
    module.quantization_scheme = None
    initialize_observer(module, "weight")
    freeze_module_quantization(module)
    assert not hasattr(module, "quantization_status")


def test_dynamic_tensors_have_no_observer() -> None:
    dynamic = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    module = linear(weights=CHANNEL, input_activations=dynamic)
    initialize_observer(module, "input")
    initialize_observer(module, "output")
    assert observer_of(module, "input") is None
    assert observer_of(module, "output") is None
    initialize_observer(module, "weight")
    assert observer_of(module, "weight") is not None


def test_local_tensors_have_one_for_their_global_scale() -> None:
    module = nn.Linear(16, 3)
    nvfp4 = preset_name_to_scheme("NVFP4", ["Linear"])
    initialize_module_for_quantization(module, nvfp4)
    initialize_observer(module, "input")
    x = torch.randn(5, 16)
    calibrate_input_hook(module, (x,))
    update_qparams(module, "input")
    # 448 · 6 / absmax: the largest values of e4m3 and of e2m1
    assert torch.allclose(module.input_global_scale, 448 * 6 / x.abs().max())
    assert not hasattr(module, "input_scale")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "memoryless_minmax"),
        ("minmax", "memoryless_minmax"),
        ("MinMax", "memoryless_minmax"),
        ("static_minmax", "memoryless_minmax"),
        ("mse", "memoryless_mse"),
        ("memoryless_mse", "memoryless_mse"),
    ],
)
def test_weights_are_seen_without_memory(given: str | None, expected: str) -> None:
    kwargs = {"averaging_constant": 0.5} if given in ("minmax", "mse") else {}
    args = CHANNEL.model_copy(update={"observer": given, "observer_kwargs": kwargs})
    module = linear(weights=args)
    initialize_observer(module, "weight")
    assert observer_of(module, "weight").registered_name() == expected
    assert args.observer == given
    assert args.observer_kwargs == kwargs
    observe(module, "weight")
    with torch.no_grad():
        module.weight.mul_(0.25)
    observe(module, "weight")
    update_qparams(module, "weight")
    if expected == "memoryless_minmax":
        assert torch.equal(module.weight_scale, module.weight.abs().amax(1, True) / 127.5)


def test_activations_keep_their_memory() -> None:
    args = STATIC.model_copy(update={"observer": "minmax"})
    module = linear(input_activations=args)
    initialize_observer(module, "input")
    assert observer_of(module, "input").registered_name() == "minmax"


# Hooks


def test_hooks_registered_by_hand() -> None:
    module = linear(input_activations=STATIC, output_activations=STATIC)
    for base_name in ("input", "output"):
        initialize_observer(module, base_name)
    module.register_forward_pre_hook(calibrate_input_hook)
    module.register_forward_hook(calibrate_output_hook)
    plain = nn.Linear(4, 3)
    plain.load_state_dict({"weight": module.weight, "bias": module.bias})
    xs = [torch.randn(2, 5, 4) * size for size in (1, 3, 2)]
    results = [module(x) for x in xs]
    for x, result in zip(xs, results, strict=True):
        assert torch.equal(result, plain(x))
    update_qparams(module, ["input", "output"])
    assert torch.equal(module.input_scale, int8_scale(*xs).reshape(1))
    assert torch.equal(module.output_scale, int8_scale(*results).reshape(1))
    assert observer_of(module, "input").num_observed_tokens == 30
    assert module.input_zero_point.tolist() == [0] if hasattr(module, "input_zero_point") else True


class Fussy(nn.Module):
    """Takes its input by keyword, and returns it within a tuple within a dict."""

    def forward(self, *, flag: bool, hidden: Tensor) -> dict[str, Any]:
        assert flag
        return {"cache": None, "states": ((hidden * 2,), hidden * 50)}


def test_hooks_find_the_first_tensor() -> None:
    module: Any = Fussy()
    module.quantization_scheme = scheme(input_activations=STATIC, output_activations=STATIC)
    for base_name in ("input", "output"):
        initialize_observer(module, base_name)
    module.register_forward_pre_hook(calibrate_input_hook, with_kwargs=True)
    module.register_forward_hook(calibrate_output_hook)
    hidden = torch.randn(3, 4)
    module(flag=True, hidden=hidden)
    found = observer_of(module, "input").get_qparams()["scale"]
    assert torch.equal(found, int8_scale(hidden).reshape(1))
    found = observer_of(module, "output").get_qparams()["scale"]
    assert torch.equal(found, int8_scale(hidden * 2).reshape(1))


def test_attention_hooks() -> None:
    module = nn.Module()
    module.quantization_scheme = scheme(
        input_activations=STATIC.model_copy(update={"strategy": "attn_head"})
    )
    states = torch.randn(2, 3, 5, 8)
    hooks = {"q": calibrate_query_hook, "k": calibrate_key_hook, "v": calibrate_value_hook}
    for factor, (base_name, hook) in enumerate(hooks.items(), start=1):
        initialize_observer(module, base_name)
        assert hook(module, states * factor) is None
    for factor, base_name in enumerate(hooks, start=1):
        scale = observer_of(module, base_name).get_qparams()["scale"]
        expected = (states * factor).abs().amax(dim=(0, 2, 3)) / 127.5
        assert torch.equal(scale.flatten(), expected)


def test_hooks_change_nothing_and_honour_the_mask() -> None:
    module = linear(input_activations=STATIC)
    initialize_observer(module, "input")
    x = torch.tensor([[[1.0, -2.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]]])
    copy = x.clone()
    with token_mask(torch.tensor([[1, 0]])):
        assert calibrate_input_hook(module, (x,)) is None
    assert torch.equal(x, copy)
    assert observer_of(module, "input").max_vals.tolist() == [1.0]
    assert observer_of(module, "input").num_observed_tokens == 1


def test_nothing_to_see_is_no_error() -> None:
    module = linear(input_activations=STATIC, output_activations=STATIC)
    for base_name in ("input", "output"):
        initialize_observer(module, base_name)
    calibrate_input_hook(module, ())
    calibrate_input_hook(module, ("text", None), {"flag": True})
    calibrate_input_hook(module, (torch.empty(0, 4),))
    calibrate_output_hook(module, (), None)
    assert not observer_of(module, "input").has_statistics
    assert not observer_of(module, "output").has_statistics


def test_a_hook_without_observer_says_what_to_do() -> None:
    message = (
        "Linear has no observer for 'input'. Call initialize_observer(module, 'input') before "
        "the model runs."
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        calibrate_input_hook(nn.Linear(2, 2), (torch.zeros(1, 2),))


def test_non_finite_values_name_the_module() -> None:
    module = linear(weights=CHANNEL)
    initialize_observer(module, "weight", name="layers.7.up_proj")
    with torch.no_grad():
        module.weight[0, 0] = torch.nan
    with pytest.raises(TensorValueError, match=r"\(weight of layers\.7\.up_proj\) was given 1 "):
        observe(module, "weight")


# Parameters


def test_parameters_from_a_weight() -> None:
    modules = [linear(weights=CHANNEL) for _ in range(2)]
    for module in modules:
        initialize_observer(module, "weight")
    observe(modules, "weight")
    update_qparams(modules, "weight")
    for module in modules:
        assert torch.equal(module.weight_scale, module.weight.abs().amax(1, True) / 127.5)


def test_parameters_of_offloaded_modules() -> None:
    module = linear(weights=CHANNEL)
    expected = module.weight.detach().abs().amax(1, True) / 127.5
    offload_module(module, "cpu", "cpu")
    initialize_observer(module, "weight")
    observe(module, "weight")
    update_qparams(module, "weight")
    assert torch.equal(module.weight_scale, expected)


def test_asymmetric_parameters() -> None:
    args = STATIC.model_copy(update={"symmetric": False})
    module = linear(input_activations=args)
    initialize_observer(module, "input")
    calibrate_input_hook(module, (torch.tensor([[-1.0, 0.0, 0.5, 2.0]]),))
    update_qparams(module, "input")
    assert torch.allclose(module.input_scale, torch.tensor([3 / 255]))
    assert module.input_zero_point.tolist() == [round(-128 + 255 / 3)]


def test_parameters_of_nothing_are_refused() -> None:
    module = linear(input_activations=STATIC)
    initialize_observer(module, "input", name="layers.3.down_proj")
    module.input_scale.data.fill_(3.0)  # it comes uninitialized
    message = (
        "No statistics available. Call observer(value) first. Nothing reached "
        "Observer 'static_minmax' (input of layers.3.down_proj)."
    )
    with pytest.raises(NoStatisticsError, match=f"^{re.escape(message)}$"):
        update_qparams(module, "input")
    assert bool((module.input_scale == 3.0).all())


def test_reading_parameters_twice_gives_the_same() -> None:
    module = linear(input_activations=STATIC)
    initialize_observer(module, "input")
    calibrate_input_hook(module, (torch.randn(3, 4),))
    update_qparams(module, "input")
    first = module.input_scale.clone()
    update_qparams(module, "input")
    assert torch.equal(module.input_scale, first)


# Freezing


def test_freezing_takes_observers_and_keeps_parameters() -> None:
    module = linear(weights=CHANNEL, input_activations=STATIC, output_activations=STATIC)
    for base_name in ("weight", "input", "output"):
        initialize_observer(module, base_name)
    assert module.quantization_status == QuantizationStatus.INITIALIZED
    x = torch.randn(2, 4)
    calibrate_input_hook(module, (x,))
    calibrate_output_hook(module, (x,), module(x))
    observe(module, "weight")
    update_qparams(module, ["weight", "input", "output"])
    scales = {name: value.clone() for name, value in module.named_parameters() if "scale" in name}
    nn.Sequential(module).apply(freeze_module_quantization)
    assert module.quantization_status == QuantizationStatus.FROZEN
    assert not list(module.children())
    assert sorted(scales) == ["input_scale", "output_scale", "weight_scale"]
    for name, value in scales.items():
        assert torch.equal(module.get_parameter(name), value)
    freeze_module_quantization(module)  # again: nothing left to do
    assert module.quantization_status == QuantizationStatus.FROZEN


def test_importance_is_attached_and_left_behind() -> None:
    module = linear(weights=CHANNEL.model_copy(update={"observer": "imatrix_mse"}))
    initialize_observer(module, "weight")
    xs = [torch.randn(2, 5, 4) for _ in range(3)]
    plain = [nn.functional.linear(x, module.weight, module.bias) for x in xs]
    assert all(torch.equal(module(x), result) for x, result in zip(xs, plain, strict=True))
    freeze_module_quantization(module)
    assert not module._forward_pre_hooks
    expected = torch.cat(xs).reshape(-1, 4).double().square().sum(0)
    assert torch.allclose(module._imatrix_sum.double(), expected, rtol=1e-6)
    assert int(module._imatrix_count) == 30
    module(xs[0])
    assert int(module._imatrix_count) == 30
    initialize_observer(module, "weight")  # the next one takes the sums over
    assert int(observer_of(module, "weight")._imatrix_count) == 30
    assert not module._forward_pre_hooks
    assert not hasattr(module, "_imatrix_sum")
