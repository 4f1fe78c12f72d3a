"""Finite values, however odd, have finite parameters: no NaN is found only when serving."""

from __future__ import annotations

import pytest
import torch
from data import DTYPES, SCALE_FORMATS, schemes
from pairwise import pairwise
from torch import Tensor

from calipers.observers import Observer

SCHEMES = {
    name: scheme
    for name, scheme in schemes().items()
    if name in SCALE_FORMATS or name.endswith(("int4", "int8_asym", "fp8", "fp8_asym", "fp4"))
}
EXTREMES = {
    "zeros": lambda x, _: x.zero_(),
    "subnormal": lambda x, info: x.fill_(info.smallest_normal / 4),
    "smallest": lambda x, info: x.fill_(info.smallest_normal),
    "negative": lambda x, _: x.fill_(-0.3),
    "largest": lambda x, info: x.clamp_(-1, 1).mul_(info.max),
    "all_orders": lambda x, _: x.mul_(10 ** torch.empty_like(x).uniform_(-4, 4)),
}


def extreme(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    value = EXTREMES[kind](torch.randn(shape), info)
    return value.clamp(info.min, info.max).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.filterwarnings("ignore:.*Falls back to plain error")
def test_parameters_are_finite(kind: str, dtype: torch.dtype) -> None:
    for name, scheme in pairwise(["minmax", "mse"], list(SCHEMES)):
        check(name, scheme, kind, dtype)


@pytest.mark.parametrize(
    ("scheme", "kind", "dtype"),
    pairwise(["nvfp4", "mxfp4", "weight-channel-int8_asym"], list(EXTREMES), DTYPES),
)
def test_expanded_ranges_stay_within_their_dtype(
    scheme: str, kind: str, dtype: torch.dtype
) -> None:
    check("nvfp4_expanded_mse", scheme, kind, dtype)


def check(name: str, scheme: str, kind: str, dtype: torch.dtype) -> None:
    base_name, shape, args = SCHEMES[scheme]
    observer = Observer.load_from_registry(name, base_name=base_name, args=args)
    qparams = observer(extreme(kind, shape, dtype)).get_qparams()
    for key, value in qparams.items():
        assert value is None or torch.isfinite(value.float()).all(), (scheme, key, value)
    assert (qparams["scale"].float() > 0).all(), scheme
