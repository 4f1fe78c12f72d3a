"""Observers written for the first generation of the API: other keywords, ``calculate_qparams``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from calipers.errors import ConfigurationError
from calipers.numerics.layout import check_base_name

Calculate = Callable[..., tuple[Tensor, Tensor]]


def construct(kind: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """Build an observer, whichever generation its constructor was written for.

    Options in ``args.observer_kwargs`` reach a constructor that names them. One that knows only
    ``quantization_args`` is given that, and its ``base_name`` afterwards.
    """
    takes = _parameters(kind)
    args = keywords.get("args", keywords.get("quantization_args"))
    options = getattr(args, "observer_kwargs", None) or {}
    keywords = {**{key: value for key, value in options.items() if key in takes}, **keywords}
    if "quantization_args" not in takes or "args" in takes:
        return kind(**keywords)
    base_name = keywords.pop("base_name", "weight")
    check_base_name(base_name)
    keywords.pop("args", None)
    observer = kind(**{**keywords, "quantization_args": args})
    observer.base_name = base_name
    return observer


@lru_cache
def _parameters(kind: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(kind).parameters)


def calculate_by_piece(
    calculate: Calculate, view: Tensor, global_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of every piece of a canonical view.

    A method with ``reduce_dims`` is called once for all pieces, others piece by piece, and told
    which one by ``tensor_id`` if they take it.
    """
    shape = view.shape[1:-1]
    options = {"global_scale": global_scale} if _takes(calculate, "global_scale") else {}
    if shape.numel() == 1:
        results = [calculate(view, **options)]
    elif _takes(calculate, "reduce_dims"):
        results = [calculate(view, reduce_dims=(0, view.ndim - 1), **options)]
    else:
        results = _each(calculate, view.flatten(1, -2), options)
    scale = torch.cat([torch.as_tensor(scale).reshape(-1) for scale, _ in results])
    zero_point = torch.cat([torch.as_tensor(zero).reshape(-1) for _, zero in results])
    shape = shape or torch.Size([1])
    if not scale.numel() == zero_point.numel() == shape.numel():
        raise ConfigurationError(
            f"calculate_qparams returned {scale.numel()} scales and {zero_point.numel()} zero "
            f"points where {shape.numel()} are needed."
        )
    return scale.reshape(shape), zero_point.reshape(shape)


def _each(
    calculate: Calculate, pieces: Tensor, options: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    named = _takes(calculate, "tensor_id")
    return [
        calculate(piece, **options, **({"tensor_id": index} if named else {}))
        for index, piece in enumerate(pieces.unbind(1))
    ]


def _takes(calculate: Calculate, name: str) -> bool:
    return name in inspect.signature(calculate).parameters
