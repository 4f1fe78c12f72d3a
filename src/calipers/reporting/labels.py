"""How tensors are quantized, in a few words."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from calipers.errors import CalipersError
from calipers.numerics.formats import Format
from calipers.numerics.layout import granularity_name


def scheme_label(scheme: QuantizationScheme | None) -> str:
    """Return how a module is quantized, in a few words.

    >>> int8 = QuantizationArgs(num_bits=8)
    >>> scheme_label(QuantizationScheme(targets=["Linear"], weights=int8, input_activations=int8))
    'int8 by tensor, input int8 by tensor'
    """
    if scheme is None:
        return "not quantized"
    sides = {"": scheme.weights, "input ": scheme.input_activations}
    sides["output "] = scheme.output_activations
    return ", ".join(f"{side}{args_label(args)}" for side, args in sides.items() if args)


def args_label(args: QuantizationArgs) -> str:
    """Return a format and its granularity in a few words."""
    try:
        name = Format.of(args).name
    except CalipersError:  # a format of somebody else
        name = f"{args.type}{args.num_bits}"
    dynamic = " while it runs" if args.dynamic else ""
    return f"{name} by {granularity_name(args)}{dynamic}"
