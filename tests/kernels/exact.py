"""Searches, and what they should have found by float64."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers.kernels.reductions import extrema
from calipers.kernels.search import RangeSearch, search_range
from calipers.numerics.formats import Format
from calipers.numerics.qparams import quantize_dequantize, safe_qparams

INT4 = QuantizationArgs(num_bits=4, group_size=8)
FACTORS = [1 - i / 10 for i in range(10)]
SHRINK = [1 - i / 20 for i in range(12)]
MXFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
)


def run(view: torch.Tensor, args: QuantizationArgs = INT4, **options: object) -> torch.Tensor:
    """Search, and return the index of the chosen factor of each piece."""
    options = {"factors": FACTORS, "norm": 2.0, **options}
    found = extrema(view.unsqueeze(-2))
    low, high = search_range(
        RangeSearch(view.unsqueeze(-2), found.min_vals, found.max_vals, args, **options)
    )
    largest = torch.maximum(-found.min_vals, found.max_vals)
    ratio = torch.maximum(-low, high).double() / largest.double()
    return (ratio[..., None] - torch.tensor(options["factors"])).abs().argmin(-1)


def exact_error(
    values: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    args: QuantizationArgs,
    norm: float,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The error of every piece under a range, in float64, with the scale as stored."""
    if args.strategy == "tensor_group":
        args = args.model_copy(update={"scale_dtype": None})
    x = values.double().flatten(-2)
    scale, zero = (v.double().unsqueeze(-1) for v in safe_qparams(start, end, args))
    q = quantize_dequantize(x, scale, None if args.symmetric else zero, Format.of(args))
    error = (q - x).abs().pow(norm)
    return (error if weights is None else error * _spread(weights, x)).sum((0, -1)).flatten()


def _spread(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    count = x.shape[1:-1].numel()
    rows = weights.double()[torch.arange(count) % len(weights)]
    return rows.reshape(1, *x.shape[1:])


def check_choice(
    laid_out: torch.Tensor,
    values: torch.Tensor,
    args: QuantizationArgs,
    norm: float,
    weights: torch.Tensor | None = None,
    expand: float = 1.0,
) -> None:
    """The choice is the best one, wherever the two best differ by more than float32 rounding."""
    low, high = values.amin((0, -2, -1)), values.amax((0, -2, -1))
    candidates = [
        [(bound.float() * expand * torch.tensor(factor)).to(bound.dtype) for bound in (low, high)]
        for factor in SHRINK
    ]
    errors = torch.stack([exact_error(values, *c, args, norm, weights) for c in candidates])
    found = search_range(
        RangeSearch(
            laid_out, low, high, args, factors=SHRINK, norm=norm, weights=weights, expand=expand
        )
    )
    least, best = errors.min(0)
    assert (exact_error(values, *found, args, norm, weights) <= least * (1 + 1e-6)).all()
    second = errors.topk(2, dim=0, largest=False).values[1]
    sure = second > least * (1 + 1e-6)
    for side, result in enumerate(found):
        of_all = torch.stack([candidate[side].flatten() for candidate in candidates])
        expected = of_all.gather(0, best[None])[0]
        assert torch.equal(result.flatten()[sure], expected[sure])
