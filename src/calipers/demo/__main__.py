"""Observe a random transformer block with every observer, and show what quantization loses.

Run with ``python -m calipers.demo``. Nothing is written to disk.
"""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from compressed_tensors.quantization import QuantizationArgs
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from calipers.demo.block import TransformerBlock, random_batches, split_heads
from calipers.errors import CalipersWarning, UnsuitableError
from calipers.numerics.qparams import fake_quantize
from calipers.observers import Observer, fuse_weight_observers

NOTHING = "–"
WEIGHT_SCHEMES = {
    "int4\ng128": QuantizationArgs(num_bits=4, strategy="group", group_size=128),
    "int8\nchannel": QuantizationArgs(num_bits=8, strategy="channel"),
    "fp8\nchannel": QuantizationArgs(num_bits=8, type="float", strategy="channel"),
    "fp8\nblock": QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
    "NVFP4\ng16": QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    ),
    "MXFP4\ng32": QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
}

P = ParamSpec("P")
T = TypeVar("T")
Rows = Mapping[str, Sequence[float | None]]


class Stream(NamedTuple):
    """The tensors that passed one place of the block, and how they will be quantized."""

    title: str
    base_name: str
    args: QuantizationArgs
    tensors: list[Tensor]


class Loss(NamedTuple):
    """What quantized weights lose, in percent: of the weights, and of the block's output."""

    weights: float
    output: float


def main() -> None:
    """Print what each observer loses on weights, on the block's output, and on activations."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # as fast as more on tensors this small, and safe beside busy programs
    console = Console()
    block, batches = TransformerBlock(), random_batches(count=4, sequences=2, tokens=64)
    with console.status("Observing …"), torch.no_grad():
        losses = {name: row for name, row in lose_weights(block, batches).items() if any(row)}
        streams = record_streams(block, batches)
        activations = {
            name: [lose_stream(name, stream) for stream in streams]
            for name in Observer.registered_names()
        }
    schemes = list(WEIGHT_SCHEMES)
    weights = {name: [loss and loss.weights for loss in row] for name, row in losses.items()}
    outputs = {name: [loss and loss.output for loss in row] for name, row in losses.items()}
    streamed = {name: row for name, row in activations.items() if any(row)}
    titles = [stream.title for stream in streams]
    console.print(table("Weights: error in % of the weights", schemes, weights))
    console.print(table("Weights: error in % of the block's output", schemes, outputs))
    console.print(table("Activations: error in % of the whole stream", titles, streamed))
    console.print(f"* best of its column   {NOTHING} the observer has nothing to do here")
    count = sum(linear.weight.numel() for linear in block.linears().values())
    seconds = time.perf_counter() - started
    console.print(
        f"{count:,} weights observed by {len(losses)} observers in {len(schemes)} formats, "
        f"in {seconds:.1f} s.",
        highlight=False,
    )


def none_on_fallback(measure: Callable[P, T]) -> Callable[P, T | None]:
    """Return None where an observer is not made for a scheme, or falls back to another one."""

    @functools.wraps(measure)
    def measure_or_none(*args: P.args, **kwargs: P.kwargs) -> T | None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CalipersWarning)
            try:
                return measure(*args, **kwargs)
            except (CalipersWarning, UnsuitableError):
                return None

    return measure_or_none


def lose_weights(block: TransformerBlock, batches: list[Tensor]) -> dict[str, list[Loss | None]]:
    """Return for each observer what is lost in each scheme."""
    outputs = torch.cat([block(batch) for batch in batches])
    return {
        name: [lose_weight(name, args, block, batches, outputs) for args in WEIGHT_SCHEMES.values()]
        for name in Observer.registered_names()
    }


@none_on_fallback
def lose_weight(
    name: str,
    args: QuantizationArgs,
    block: TransformerBlock,
    batches: list[Tensor],
    outputs: Tensor,
) -> Loss:
    """Quantize a copy of the block with what the observer finds."""
    quantized = copy.deepcopy(block)
    for linear, observer in observe_weights(name, args, quantized, batches).items():
        linear.weight.copy_(fake_quantize(linear.weight, args=args, **observer.get_qparams()))
    return Loss(
        relative_error(all_weights(quantized), all_weights(block)),
        relative_error(torch.cat([quantized(batch) for batch in batches]), outputs),
    )


def observe_weights(
    name: str, args: QuantizationArgs, block: TransformerBlock, batches: list[Tensor]
) -> dict[nn.Linear, Observer]:
    """Give each Linear an observer, which sees the data that runs through it, then the weight."""
    observers = {
        linear: Observer.load_from_registry(name, base_name="weight", args=args)
        for linear in block.linears().values()
    }
    for linear, observer in observers.items():
        linear.weight_observer = observer
        observer.attach(linear)
    for batch in batches:
        block(batch)
    fuse_weight_observers(block)
    for linear, observer in observers.items():
        observer.detach(linear)
        observer(linear.weight)
    return observers


def record_streams(block: TransformerBlock, batches: list[Tensor]) -> list[Stream]:
    """Run the data and keep what reaches the down projection, and the keys."""
    down_inputs: list[Tensor] = []
    keys: list[Tensor] = []
    with (
        block.mlp.down_proj.register_forward_pre_hook(lambda _, x: down_inputs.append(x[0])),
        block.self_attn.k_proj.register_forward_hook(lambda *x: keys.append(split_heads(x[-1]))),
    ):
        for batch in batches:
            block(batch)
    int8 = QuantizationArgs(num_bits=8, strategy="tensor")
    fp8 = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    by_head = QuantizationArgs(num_bits=8, type="float", strategy="attn_head")
    return [
        Stream("down input\nint8 tensor", "input", int8, down_inputs),
        Stream("down input\nfp8 tensor", "input", fp8, down_inputs),
        Stream("k states\nfp8 head", "k", by_head, keys),
    ]


@none_on_fallback
def lose_stream(name: str, stream: Stream) -> float:
    """Observe the stream, then quantize all of it with what was found."""
    observer = Observer.load_from_registry(name, base_name=stream.base_name, args=stream.args)
    for tensor in stream.tensors:
        observer(tensor)
    whole = torch.cat(stream.tensors)
    return relative_error(fake_quantize(whole, args=stream.args, **observer.get_qparams()), whole)


def relative_error(quantized: Tensor, original: Tensor) -> float:
    """Return ‖quantized − original‖ / ‖original‖ in percent."""
    difference = quantized.double() - original.double()
    return 100 * float(difference.norm() / original.double().norm())


def all_weights(block: TransformerBlock) -> Tensor:
    """Return every weight of the block as one vector."""
    return torch.cat([linear.weight.flatten() for linear in block.linears().values()])


def table(title: str, columns: Sequence[str], rows: Rows) -> Table:
    """Lay out one number per observer and column, the best of each column marked."""
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    result.add_column("observer", no_wrap=True)
    for column in columns:
        result.add_column(column, justify="right", no_wrap=True)
    shown = {name: [percent(value) for value in row] for name, row in rows.items()}
    best = [percent(least(column)) for column in zip(*rows.values(), strict=True)]
    for name, texts in shown.items():
        result.add_row(name, *(cell(*pair) for pair in zip(texts, best, strict=True)))
    return result


def least(column: Iterable[float | None]) -> float | None:
    """Return the smallest value of a column, if it has any."""
    return min((value for value in column if value is not None), default=None)


def percent(value: float | None) -> str:
    """Write a number with three digits that count."""
    return NOTHING if value is None else f"{value:.{2 if value < 10 else 1}f}"


def cell(text: str, best: str) -> Text:
    """Mark the best of a column, with a star for where nothing can be bold."""
    return Text(f"{text}*", style="bold") if text == best else Text(f"{text} ")


if __name__ == "__main__":
    main()
