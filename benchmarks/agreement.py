"""Whether the observers find what those of llm-compressor find, on the same weights.

For each observer, format and dtype: the share of scales that are identical, and the error of ours
over the error of theirs. The error is Σ w·|q−x|^norm in float64, with the norm that the observer
itself minimizes (2 where it minimizes nothing), w the importance where it is used, and q made with
the scales as stored. Below 1, ours is better.

    python benchmarks/agreement.py
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from calipers import CalipersWarning, Observer
from calipers.numerics.qparams import fake_quantize
from calipers.observers import QParamsDict

try:
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")
    from llmcompressor.observers import Observer as Peer
except ImportError:
    sys.exit("llm-compressor is not installed here: `make bench` sets it up and runs this file.")

ROWS, COLUMNS, TOKENS = 256, 1024, 64
RESULTS = Path(__file__).parent / "results" / "agreement.json"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WEIGHED = ("channel", "group", "tensor_group")  # the strategies under which importance is used
FORMATS: dict[str, dict[str, Any]] = {
    "int4 group 128": {"num_bits": 4, "strategy": "group", "group_size": 128},
    "int4 group 128 asymmetric": {
        "num_bits": 4,
        "strategy": "group",
        "group_size": 128,
        "symmetric": False,
    },
    "int8 channel": {"num_bits": 8, "strategy": "channel"},
    "fp8 channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 block 128x128": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
    },
    "NVFP4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn,
    },
    "MXFP4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": torch.uint8,
    },
    "MXFP8": {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": torch.uint8,
    },
}


class Comparison(NamedTuple):
    """One observer on one weight, ours beside theirs."""

    format: str
    observer: str
    dtype: str
    same_scales: float
    same_zero_points: float
    same_global_scale: bool
    our_error: float
    peer_error: float

    @property
    def error_ratio(self) -> float:
        """Our error over theirs; without any error on both sides, 1."""
        return self.our_error / self.peer_error if self.peer_error else 1.0 + self.our_error


class Sample(NamedTuple):
    """A weight and the activations that run through it."""

    weight: Tensor
    inputs: Tensor


def main() -> int:
    """Compare everything, print the table and save it."""
    torch.set_num_threads(1)  # one order of summation, and safe beside busy programs
    comparisons = list(compare_all())
    console = Console()
    console.print(table(comparisons))
    for dtype in DTYPES:
        console.print(summary(dtype, comparisons), highlight=False)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**row._asdict(), "error_ratio": row.error_ratio} for row in comparisons]
    RESULTS.write_text(json.dumps({"shape": [ROWS, COLUMNS], "results": rows}, indent=2) + "\n")
    return 0


def compare_all() -> Iterator[Comparison]:
    """Run every observer in every format and dtype."""
    sample = draw_sample()
    for fmt in FORMATS:
        for observer in common_observers():
            for dtype in DTYPES:
                yield compare(fmt, observer, dtype, sample)


def common_observers() -> list[str]:
    """Return the names of the observers that both have."""
    theirs = {name.replace("-", "_") for name in Peer.registered_names()}
    return [name for name in Observer.registered_names() if name in theirs]


def draw_sample() -> Sample:
    """Draw heavy-tailed weights, and inputs whose channels differ in size."""
    torch.manual_seed(0)
    weight = torch.distributions.StudentT(4.0).sample((ROWS, COLUMNS)) * 0.02
    return Sample(weight, torch.randn(TOKENS, COLUMNS) * torch.rand(COLUMNS) * 3)


def compare(fmt: str, name: str, dtype: str, sample: Sample) -> Comparison:
    """Let both observers see the same, and judge what they find."""
    sample = Sample(*(tensor.to(DTYPES[dtype]) for tensor in sample))
    # Each has arguments of its own, because the peer changes them.
    args, peer_args = QuantizationArgs(**FORMATS[fmt]), QuantizationArgs(**FORMATS[fmt])
    our_observer = Observer.load_from_registry(name, base_name="weight", args=args)
    peer_observer = Peer.load_from_registry(name, base_name="weight", args=peer_args)
    ours, theirs = observe(our_observer, sample), observe(peer_observer, sample)
    norm = getattr(our_observer, "norm", 2.0)
    weighed = name == "imatrix_mse" and args.strategy in WEIGHED
    importance = sample.inputs.double().square().mean(0) if weighed else None
    return Comparison(
        fmt,
        name,
        dtype,
        share_of_equals(ours["scale"], theirs["scale"]),
        share_of_equals(ours["zero_point"], theirs["zero_point"]),
        share_of_equals(ours["global_scale"], theirs["global_scale"]) == 1,
        total_error(sample.weight, ours, args, norm, importance),
        total_error(sample.weight, theirs, args, norm, importance),
    )


def observe(observer: Any, sample: Sample) -> QParamsDict:
    """Attach the observer, run the inputs, detach it, observe the weight."""
    rows, columns = sample.weight.shape
    linear = torch.nn.Linear(columns, rows, bias=False, dtype=sample.weight.dtype)
    observer.attach(linear)
    linear(sample.inputs)
    observer.detach(linear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)  # imatrix_mse falls back, as the peer does
        observer(sample.weight)
    qparams: QParamsDict = observer.get_qparams()
    return qparams


def share_of_equals(ours: Tensor | None, theirs: Tensor | None) -> float:
    """Return how many of the numbers are the same, from 0 to 1."""
    if ours is None or theirs is None:
        return float(ours is theirs)
    return float((ours.double() == theirs.double()).double().mean())


def total_error(
    weight: Tensor,
    qparams: QParamsDict,
    args: QuantizationArgs,
    norm: float,
    importance: Tensor | None,
) -> float:
    """Return Σ w·|q−x|^norm in float64."""
    global_scale = qparams["global_scale"]
    precise = {
        "scale": qparams["scale"].double(),
        "zero_point": qparams["zero_point"].double(),
        "global_scale": None if global_scale is None else global_scale.double(),
    }
    exact = weight.double()
    error = (fake_quantize(exact, args=args, **precise) - exact).abs().pow(norm)
    return float(error.sum() if importance is None else (error * importance).sum())


def table(comparisons: list[Comparison]) -> Table:
    """Lay out one row per format and observer, and two columns per dtype."""
    result = Table(
        title="same: % of scales identical to the peer's; error: ours ÷ the peer's",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    result.add_column("observer", no_wrap=True)
    for dtype in DTYPES:
        result.add_column(f"{dtype}\nsame", justify="right", no_wrap=True)
        result.add_column(f"{dtype}\nerror", justify="right", no_wrap=True)
    for fmt in FORMATS:
        result.add_section()
        result.add_row(fmt, style="bold")
        for observer in common_observers():
            found = [c for c in comparisons if (c.format, c.observer) == (fmt, observer)]
            cells = [text for c in found for text in (share(c.same_scales), ratio(c.error_ratio))]
            result.add_row(f"  {observer}", *cells)
    return result


def share(value: float) -> str:
    """Write a share in percent; 100.0 is said only of all."""
    return f"{min(100 * value, 99.9):.1f}" if value < 1 else "100.0"


def ratio(value: float) -> str:
    """Write a ratio; 1.0000 may be a little off, 1 is exact."""
    return "1" if value == 1 else f"{value:.4f}"


def summary(dtype: str, comparisons: list[Comparison]) -> str:
    """Say in one line how far one dtype agrees."""
    found = [c for c in comparisons if c.dtype == dtype]
    same = sum(c.same_scales == 1 for c in found)
    ratios = sorted(c.error_ratio for c in found)
    return (
        f"{dtype}: every scale identical in {same} of {len(found)} cases; "
        f"error ratio {ratio(ratios[0])} to {ratio(ratios[-1])}"
    )


if __name__ == "__main__":
    sys.exit(main())
