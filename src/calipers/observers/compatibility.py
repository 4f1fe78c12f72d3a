"""What is here only for observers of older generations of the API.

Their constructors take other keywords, or the arguments first. They write ``calculate_qparams``,
declare their fields in an ``_act_sync_dict``, and unpack into their results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import ConfigurationError
from calipers.numerics.layout import check_base_name
from calipers.statistics.base import Reduction

Calculate = Callable[..., tuple[Tensor, Tensor]]

ALIASES = {"avg_constant": "averaging_constant"}
"""Other names of options, as attributes of an observer."""


def declared_fields(cls: type, *, keeps_results: bool) -> dict[str, Reduction]:
    """Collect the fields that a class and its bases declare, in either way, the nearest winning.

    :param keeps_results: whether the results of ``calculate_qparams`` are fields too
    """
    collected: dict[str, Reduction] = {}
    for base in reversed(cls.__mro__):
        collected.update(base.__dict__.get("reductions", {}))
        for name, reduce_op in base.__dict__.get("_act_sync_dict", {}).items():
            collected[name] = Reduction.of(reduce_op)
    results = {"_scale": Reduction.LAST, "_zero_point": Reduction.LAST}
    return collected | results if keeps_results else collected


def base_name_and_args(
    owner: str, base_name: Any, args: Any, quantization_args: Any
) -> tuple[str, QuantizationArgs]:
    """Return what a constructor was given, in whichever order and under whichever name."""
    if isinstance(base_name, QuantizationArgs):
        if args is not None:
            raise ConfigurationError(
                f"Observer '{owner}' takes one QuantizationArgs; give its options by keyword."
            )
        base_name, args = "weight", base_name
    check_base_name(base_name)
    both = [given for given in (args, quantization_args) if given is not None]
    if len(both) != 1 or not isinstance(both[0], QuantizationArgs):
        raise ConfigurationError(
            f"Observer '{owner}' needs QuantizationArgs, given once: "
            "as args (or, in code of the first generation, as quantization_args)."
        )
    return base_name, both[0]


def construct(kind: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """Build an observer, whichever generation its constructor was written for.

    Options in ``args.observer_kwargs`` reach a constructor that names them. One that knows only
    ``quantization_args`` is given that, and its ``base_name`` afterwards.
    """
    takes = parameters_of(kind)
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


def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters of a function or constructor."""
    return frozenset(inspect.signature(function).parameters)


def calculated_fields(
    calculate: Calculate, view: Tensor, global_scale: Tensor | None
) -> dict[str, Tensor]:
    """Return scale and zero point of every piece of a canonical view, as fields of an observer.

    A method with ``reduce_dims`` is called once for all pieces, others piece by piece, and told
    which one by ``tensor_id`` if they take it.
    """
    shape, takes = view.shape[1:-1], parameters_of(calculate)
    options = {"global_scale": global_scale} if "global_scale" in takes else {}
    if shape.numel() == 1:
        results = [calculate(view, **options)]
    elif "reduce_dims" in takes:
        results = [calculate(view, reduce_dims=(0, view.ndim - 1), **options)]
    else:
        results = []
        for index, piece in enumerate(view.flatten(1, -2).unbind(1)):
            named = {"tensor_id": index} if "tensor_id" in takes else {}
            results.append(calculate(piece, **options, **named))
    scale = torch.cat([torch.as_tensor(scale).reshape(-1) for scale, _ in results])
    zero_point = torch.cat([torch.as_tensor(zero).reshape(-1) for _, zero in results])
    shape = shape or torch.Size([1])
    if not scale.numel() == zero_point.numel() == shape.numel():
        raise ConfigurationError(
            f"calculate_qparams returned {scale.numel()} scales and {zero_point.numel()} zero "
            f"points where {shape.numel()} are needed."
        )
    return {"_scale": scale.reshape(shape), "_zero_point": zero_point.reshape(shape)}
