"""A stack of weights, (experts, rows, columns), is observed as its matrices are one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import dequantize, fake_quantize, quantize
from data import FORMATS, nvfp4
from laws import PROMISES
from torch import Tensor

from calipers.observers import Observer

EXPERTS, ROWS, COLUMNS = 3, 5, 64
SCHEMES = {
    "channel": QuantizationArgs(**FORMATS["int4"], strategy="channel"),
    "channel_asym": QuantizationArgs(**FORMATS["int8_asym"], strategy="channel"),
    "group": QuantizationArgs(**FORMATS["int4"], group_size=16),
    "group_asym": QuantizationArgs(**FORMATS["int4_asym"], group_size=16),
    "fp8": QuantizationArgs(**FORMATS["fp8"], strategy="channel"),
    "mxfp4": QuantizationArgs(**FORMATS["fp4"], group_size=32, scale_dtype=torch.uint8),
    "nvfp4": nvfp4(16),
}
OF_WEIGHTS = [name for name, promise in PROMISES.items() if promise.suits(SCHEMES["group"])]
PLAIN = pytest.mark.filterwarnings("ignore:.*Falls back to plain error")


def build(name: str, args: QuantizationArgs, **options: Any) -> Observer:
    return Observer.load_from_registry(name, base_name="weight", args=args, **options)


def weights(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    spread = torch.logspace(-1, 1, EXPERTS)[:, None, None]
    return (torch.randn(EXPERTS, ROWS, COLUMNS) * spread).to(dtype)


def one_by_one(observers: list[Observer], stack: Tensor) -> dict[str, Tensor]:
    """The parameters of each matrix; those with a global scale share it."""
    Observer.fuse(observers)
    for observer, weight in zip(observers, stack, strict=True):
        observer(weight)
    found = [observer.get_qparams() for observer in observers]
    together = {key: torch.stack([each[key] for each in found]) for key in ("scale", "zero_point")}
    if found[0]["global_scale"] is not None:
        together["global_scale"] = found[0]["global_scale"]
    return together


def assert_equal(found: Any, expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert torch.equal(found[key].float(), value.float()), key


@PLAIN
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_equals_its_matrices(name: str, scheme: str) -> None:
    wide = scheme in ("fp8", "group_asym")
    args, stack = SCHEMES[scheme], weights(torch.float32 if wide else torch.bfloat16)
    observer = build(name, args)(stack)
    expected = one_by_one([build(name, args) for _ in range(EXPERTS)], stack)
    assert observer.num_observed_tokens == 0
    assert_equal(observer.get_qparams(), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("name", "options"),
    [("imatrix_mse", {}), ("optimal", {}), ("optimal", {"importance": "hessian"})],
)
def test_importance_is_that_of_the_input_they_share(
    name: str, options: dict[str, Any], scheme: str
) -> None:
    args, stack = SCHEMES[scheme], weights()
    x = torch.randn(200, COLUMNS) * torch.logspace(-1.5, 0.7, COLUMNS)

    def informed() -> Observer:
        observer = build(name, args, strict=True, **options)
        linear = torch.nn.Linear(COLUMNS, 1)
        observer.attach(linear)
        linear(x)
        return observer

    found = informed()(stack).get_qparams()
    assert_equal(found, one_by_one([informed() for _ in range(EXPERTS)], stack))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_library_quantizes_with_them(scheme: str) -> None:
    args, stack = SCHEMES[scheme], weights(torch.float32)
    q = build("memoryless_minmax", args)(stack).get_qparams()
    shared = {"args": args, "global_scale": q["global_scale"]}
    each = zip(stack, q["scale"], q["zero_point"], strict=True)
    expected = torch.stack([fake_quantize(*parts, **shared) for parts in each])
    assert torch.equal(fake_quantize(stack, q["scale"], q["zero_point"], **shared), expected)
    codes = quantize(stack, q["scale"], q["zero_point"], **shared)
    assert torch.equal(dequantize(codes, q["scale"], q["zero_point"], **shared), expected)


def test_fused_stacks_share_a_global_scale() -> None:
    gate, up = build("memoryless_minmax", nvfp4(16)), build("memoryless_minmax", nvfp4(16))
    Observer.fuse([gate, up])
    stacks = weights(), 3 * weights()
    gate(stacks[0]), up(stacks[1])
    expected = build("memoryless_minmax", nvfp4(16))(torch.cat(stacks)).get_qparams()
    assert torch.equal(gate.get_qparams()["global_scale"], expected["global_scale"])
    assert torch.equal(up.get_qparams()["scale"], expected["scale"][EXPERTS:])


@PLAIN
def test_g_idx_reorders_the_columns_of_each() -> None:
    args, stack = SCHEMES["group"], weights()
    g_idx = torch.arange(COLUMNS) % 4
    order = torch.argsort(g_idx, stable=True)
    for name in ("memoryless_mse", "optimal"):
        found = build(name, args)(stack, g_idx=g_idx).get_qparams()
        assert torch.equal(
            found["scale"], build(name, args)(stack[..., order]).get_qparams()["scale"]
        )
