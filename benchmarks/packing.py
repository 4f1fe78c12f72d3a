"""How long it takes to quantize and pack a weight for a checkpoint, and to sum up its errors.

The kernel, the compressor of compressed-tensors, and one pass over the weight that copies it take
turns in one process; of each the fastest call counts.

    python benchmarks/packing.py --size 4096 --threads 2
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from one_table import measure_and_print
from racing import calling, race
from tables import Column, Row, milliseconds, number

from calipers.kernels.rounding import pack_weight

FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CASES: dict[str, tuple[CompressionFormat, dict[str, Any]]] = {
    "int4, groups of 128": (
        CompressionFormat.pack_quantized,
        {"num_bits": 4, "strategy": "group", "group_size": 128},
    ),
    "int8, channel": (CompressionFormat.int_quantized, {"num_bits": 8, "strategy": "channel"}),
    "fp8, channel": (
        CompressionFormat.float_quantized,
        {"num_bits": 8, "type": "float", "strategy": "channel"},
    ),
    "NVFP4": (CompressionFormat.nvfp4_pack_quantized, FP4),
}
COLUMNS = (
    Column("weight", "weight"),
    Column("native", "native", milliseconds),
    Column("compressed-tensors", "library", milliseconds),
    Column("times faster", "ratio", number),
    Column("one copy", "copy", milliseconds),
    Column("copies", "passes", number),
)


def main() -> None:
    """Measure every format in two dtypes, and print it."""
    options = parse_arguments()
    cases = [(name, dtype) for dtype in (torch.bfloat16, torch.float32) for name in CASES]
    measure_and_print(
        COLUMNS,
        lambda: [measure(*case, options.size, options.quick) for case in cases],
        options.threads,
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time the packing of a weight.")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of Calipers")
    parser.add_argument("--quick", action="store_true", help="run the library once")
    return parser.parse_args()


def measure(name: str, dtype: torch.dtype, size: int, quick: bool) -> Row:
    """Time one format: ours, the library, and a copy."""
    form, options = CASES[name]
    args = QuantizationArgs(**options)
    torch.manual_seed(0)
    weight = (torch.randn(size, size) * 0.02).to(dtype)
    width = args.group_size or size
    scale = weight.reshape(size, -1, width).abs().amax(-1) / 2 ** (args.num_bits - 1)
    global_scale = torch.ones(1) if args.strategy == "tensor_group" else None
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compress = BaseCompressor.get_value_from_registry(form.value).compress
    times = race(
        {
            "native": [calling(pack_weight, weight, scale, None, global_scale, args, form)],
            "copy": [calling(torch.empty_like(weight).copy_, weight)],
            "peer": [lambda: partial(compress, state, scheme)],
        },
        quick,
    )
    return {
        "weight": f"{name}, {str(dtype).removeprefix('torch.')}",
        "native": times["native"],
        "library": times["peer"],
        "ratio": times["peer"] / times["native"],
        "copy": times["copy"],
        "passes": times["native"] / times["copy"],
    }


if __name__ == "__main__":
    main()
