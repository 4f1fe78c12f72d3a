"""Whatever is quantized, and however, ``optimal`` errs no more than min-max does, as stored.

Scales are stored as compressed-tensors stores them, in the dtype of the weight, and the weight is
quantized by its functions. What leaves the dtype of the weight is Inf there.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle import (
    fake_quantize,
    initialize_module_for_quantization,
)
from data import DTYPES, FORMATS, nvfp4
from pairwise import pairwise
from torch import Tensor
from weights import MX

from calipers.errors import TensorValueError
from calipers.numerics.layout import Layout
from calipers.numerics.qparams import store_qparams
from calipers.observers import Observer

ROWS, COLUMNS = 8, 64
CUTS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 16},
    "block": {"strategy": "block", "block_structure": [2, 16]},
    "tensor_group": {"strategy": "tensor_group", "group_size": 16},
}
SCALE_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32)
WITH_SCALES_OF_THEIR_OWN = {
    "nvfp4": nvfp4(16),
    "mxfp4": QuantizationArgs(num_bits=4, **MX),
    "mxfp8": QuantizationArgs(num_bits=8, **MX),
}

Limits = Any  # torch.finfo
KINDS: dict[str, Callable[[Tensor, Limits], Tensor]] = {
    "gaussian": lambda x, _: x * 0.05,
    "positive": lambda x, _: x.abs() + 0.5,
    "constant": lambda x, _: x[:, :1].expand_as(x),
    "zeros": lambda x, _: x * 0,
    "one_outlier": lambda x, _: torch.where(torch.arange(COLUMNS) % 37 == 0, 5.0, x * 0.01),
    "two_values": lambda x, _: torch.where(x < 0.5, -0.37, 1.3),
    "near_1e-38": lambda x, limits: x * limits.smallest_normal,
    "denormal": lambda x, limits: x.sin() * limits.smallest_normal,
    "up_to_max": lambda x, limits: x.sin() * limits.max,
    "positive_up_to_max": lambda x, limits: x.sin().abs() * limits.max,
    "only_max": lambda x, limits: x.sign() * limits.max,
    "beyond_float16": lambda x, limits: x * min(limits.max / 1e3, 1e30),
}


def draw(kind: str, dtype: torch.dtype, rows: int = ROWS) -> Tensor:
    x = torch.randn(rows, COLUMNS, dtype=torch.float64)
    return KINDS[kind](x, torch.finfo(dtype)).to(dtype).contiguous()


def as_stored(weight: Tensor, args: QuantizationArgs, qparams: Any) -> tuple[Tensor, ...]:
    """Scale, zero point and global scale, as a module holds them."""
    linear = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    linear.quantization_scheme = QuantizationScheme(targets=["Linear"], weights=args)
    initialize_module_for_quantization(linear)
    store_qparams(linear, "weight", qparams)
    return (
        linear.weight_scale.data,
        linear.weight_zero_point.data,
        getattr(linear, "weight_global_scale", None),
    )


def errors_as_stored(weight: Tensor, args: QuantizationArgs, name: str, **options: Any) -> Tensor:
    """The error of each piece; of the whole where pieces share a global scale."""
    observer = Observer.load_from_registry(name, base_name="weight", args=args, **options)
    scale, zero_point, global_scale = as_stored(weight, args, observer(weight).get_qparams())
    working = torch.promote_types(weight.dtype, torch.float32)
    rounded = fake_quantize(
        weight.to(working), scale.to(working), zero_point, args, global_scale=global_scale
    )
    rounded = rounded.double()
    rounded[rounded.abs() > torch.finfo(weight.dtype).max] = torch.inf
    squares = (rounded - weight.double()).square()
    errors = Layout.of("weight", args).pieces(squares).sum((0, -1, -2))
    return errors.sum()[None] if args.strategy == "tensor_group" else errors


def check(
    args: QuantizationArgs, weight: Tensor, than: str = "memoryless_minmax", **options: Any
) -> None:
    found = errors_as_stored(weight, args, "optimal", importance="none")
    try:
        limit = errors_as_stored(weight, args, than, **options)
    except TensorValueError:  # it has no scale that can be stored
        limit = torch.full_like(found, torch.inf)
    possible = torch.isfinite(limit)
    assert bool((found[possible] <= limit[possible] * (1 + 1e-6)).all())


def combinations() -> Iterator[tuple[str, QuantizationArgs, torch.dtype]]:
    for fmt, cut in itertools.product(FORMATS, CUTS):
        for dtype, scale_dtype in itertools.product(DTYPES, SCALE_DTYPES):
            args = QuantizationArgs(**FORMATS[fmt], **CUTS[cut], scale_dtype=scale_dtype)
            yield f"{fmt}-{cut}-{scale_dtype}-{dtype}", args, dtype
    for name, args in WITH_SCALES_OF_THEIR_OWN.items():
        yield from ((f"{name}-{dtype}", args, dtype) for dtype in DTYPES)


ALL = {name: (args, dtype) for name, args, dtype in combinations()}
# Every combination would take minutes; of each kind of values others are tried.
SOME = [
    (name, kind)
    for name, kind in itertools.product(ALL, KINDS)
    if zlib.crc32(f"{name} {kind}".encode()) % 30 == 0
]


@pytest.mark.parametrize("kind", KINDS)
def test_than_min_max(kind: str) -> None:
    for name in (name for name, its_kind in SOME if its_kind == kind):
        args, dtype = ALL[name]
        torch.manual_seed(zlib.crc32(name.encode()))
        try:
            check(args, draw(kind, dtype))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    ("args", "dtype", "kind"),
    [
        (QuantizationArgs(num_bits=4, group_size=16, scale_dtype=torch.float16), "bfloat16", kind)
        for kind in ("gaussian", "beyond_float16")
    ]
    + [
        (QuantizationArgs(num_bits=bits, group_size=16, symmetric=False), "float32", kind)
        for bits, kind in itertools.product((2, 4, 8), ("gaussian", "one_outlier", "positive"))
    ]
    + [
        (QuantizationArgs(num_bits=4, group_size=16, symmetric=symmetric), "float32", kind)
        for symmetric, kind in itertools.product(
            (True, False), ("near_1e-38", "denormal", "up_to_max", "positive_up_to_max")
        )
    ],
)
def test_what_was_worse_once(args: QuantizationArgs, dtype: str, kind: str) -> None:
    weight = draw(kind, getattr(torch, dtype), rows=256)
    check(args, weight)
    if kind in ("gaussian", "one_outlier", "positive"):
        check(args, weight, "memoryless_mse", norm=2.0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_value_leaves_its_dtype(dtype: torch.dtype, symmetric: bool) -> None:
    args = QuantizationArgs(num_bits=4, group_size=16, symmetric=symmetric)
    weight = draw("up_to_max", dtype, rows=64)
    assert bool(errors_as_stored(weight, args, "optimal", importance="none").isfinite().all())


def test_stored_is_what_was_chosen() -> None:
    """No scale changes when a module stores it, whatever ``scale_dtype`` says."""
    for dtype, scale_dtype, kind in itertools.product(
        DTYPES, SCALE_DTYPES, ("gaussian", "denormal")
    ):
        args = QuantizationArgs(num_bits=4, group_size=16, scale_dtype=scale_dtype)
        weight = draw(kind, dtype)
        observer = Observer.load_from_registry("optimal", args=args, importance="none")
        qparams = observer(weight).get_qparams()
        stored = as_stored(weight, args, qparams)[0]
        assert torch.equal(stored.double(), qparams["scale"].double()), (dtype, scale_dtype, kind)


@pytest.mark.parametrize(
    ("kind", "fmt", "importance"),
    pairwise(
        ["gaussian", "one_outlier", "constant", "two_values"],
        ["int4", "int4_asym", "fp8"],
        ["imatrix", "hessian"],
    ),
)
def test_under_importance(kind: str, fmt: str, importance: str) -> None:
    args = QuantizationArgs(**FORMATS[fmt], group_size=16)
    weight = draw(kind, torch.float32)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    observer = Observer.load_from_registry("optimal", args=args, importance=importance)
    observer.attach(linear)
    linear(torch.randn(100, COLUMNS) @ torch.randn(COLUMNS, COLUMNS))
    observer.detach(linear)
    observer.gathering.take_over(linear)
    report = observer(weight).report()
    assert report.chosen <= report.minmax * (1 + 1e-6)


@pytest.mark.parametrize(
    ("norm", "fmt", "dtype"),
    pairwise([2.0, 2.4], ["int4", "int8_asym", "fp8", "fp8_asym"], DTYPES),
)
def test_histograms_too(norm: float, fmt: str, dtype: torch.dtype) -> None:
    args = QuantizationArgs(**FORMATS[fmt])
    for kind in ("gaussian", "positive", "constant", "one_outlier", "near_1e-38", "two_values"):
        values = draw(kind, dtype)
        counted = values.bfloat16().to(dtype) if dtype == torch.float32 else values

        def error(name: str, values: Tensor, counted: Tensor, **options: Any) -> float:
            observer = Observer.load_from_registry(name, base_name="input", args=args, **options)
            qparams = observer(values).get_qparams()
            parts = qparams["scale"].float(), qparams["zero_point"]
            rounded = fake_quantize(counted.float(), *parts, args)
            return float((rounded.double() - counted.double()).abs().pow(norm).sum())

        limit = error("static_minmax", values, counted)
        assert error("histogram_mse", values, counted, norm=norm) <= limit * (1 + 1e-6), kind
