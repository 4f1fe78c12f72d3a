"""How long one layer takes under its Hessian: factorisation, error feedback, descent, joint scales.

Each native kernel and its reference in torch take turns in one process; of each the fastest call
counts. Of ``optimal`` only the joint choice differs; its shortlist is searched natively in both.
Beside them, if it is installed, llm-compressor's GPTQ on the same layer and Hessian: with given
scales, to the same work of ours, the factorisation and the feedback; and with its search for scales
(``memoryless_mse``), to all that ours does to a layer: scales chosen under the Hessian, damping,
factorisation, feedback, sweeps, scales fitted to the codes, and sweeps again.

    python benchmarks/feedback.py --size 4096 --threads 2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from compressed_tensors.quantization import QuantizationArgs
from one_table import measure_and_print
from racing import race
from tables import Column, Row, number
from torch import Tensor

from calipers import Observer
from calipers.kernels import hessian as kernels
from calipers.kernels.hessian import Rounding, descend, feed_back
from calipers.numerics.formats import Format, storable_scales
from calipers.solvers.gptq import Scales, curvature, feed_back_errors

try:
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    from llmcompressor.observers import Observer as Peer
except ImportError:
    quantize_weight = None

GROUP, SWEEPS, DAMPING = 128, 4, 0.01
ARGS = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP)
FORMAT = Format.of(ARGS)
JOINT_FLOOR, PEER_FLOOR = 7.0, 10.0
COLUMNS = (
    Column("operation", "operation"),
    Column("native", "native", lambda value: f"{number(value)} s"),
    Column("in torch", "torch", lambda value: f"{number(value)} s"),
    Column("times faster", "ratio", number),
    Column("floor", "floor", number),
)


class Layer(NamedTuple):
    """A weight and what is known of its inputs."""

    weight: Tensor
    inputs: Tensor
    hessian: Tensor
    scales: Tensor
    groups: Tensor

    @classmethod
    def random(cls, size: int) -> Layer:
        """Draw a layer whose inputs go together."""
        torch.manual_seed(0)
        weight = torch.randn(size, size) * 0.02
        inputs = torch.randn(2 * size, size) @ torch.randn(size, size) / size**0.5
        inputs *= torch.randn(size).mul(0.5).exp()
        hessian = inputs.T @ inputs / len(inputs)
        scales = weight.reshape(size, -1, GROUP).abs().amax(-1) / 7.5
        return cls(weight, inputs, hessian, scales, torch.arange(size) // GROUP)

    def factor(self) -> Tensor:
        """Factorise the damped Hessian: H = M D Mᵀ."""
        damped = self.hessian.clone()
        damped.diagonal().add_(DAMPING * float(damped.diagonal().mean()))
        root: Tensor = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
        return root / root.diagonal()


def main() -> None:
    """Measure every operation, and print it."""
    options = parse_arguments()
    layer = Layer.random(options.size)
    measure_and_print(COLUMNS, lambda: measure(layer, options.quick), options.threads)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time a layer under its Hessian.")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of Calipers")
    parser.add_argument("--quick", action="store_true", help="run what is slow once")
    return parser.parse_args()


def measure(layer: Layer, quick: bool) -> list[Row]:
    """Time every operation in both versions, and the peer."""
    factor = layer.factor()
    rounding = Rounding(layer.scales, None, layer.groups, FORMAT)
    values = feed_back(layer.weight, factor, rounding)
    operations: dict[str, Callable[[], Callable[[], object]]] = {
        "error feedback": lambda: lambda: feed_back(layer.weight, factor, rounding),
        f"descent, {SWEEPS} sweeps": lambda: (
            lambda: descend(values, layer.weight, layer.hessian, rounding, sweeps=SWEEPS)
        ),
        "optimal, hessian, bf16": lambda: observing(layer, torch.bfloat16),
        "optimal, hessian, fp32": lambda: observing(layer, torch.float32),
    }
    rows: list[Row] = []
    of_torch = race({"torch": [lambda: layer.factor]}, quick)["torch"]
    rows.append({"operation": "factorisation (LAPACK)", "torch": of_torch})
    for name, prepare in operations.items():
        # What is slow runs as rarely as the peer does.
        times = race({"native": [prepare], "peer": [in_torch(prepare)]}, quick)
        floor = JOINT_FLOOR if name.startswith("optimal") else None
        rows.append(compared(name, times["native"], times["peer"], floor))
    if quantize_weight is not None:
        ours = of_torch + float(rows[1]["native"])
        times = race({"peer": [lambda: peer(layer)]}, quick)
        rows.append(compared("GPTQ, beside llm-compressor", ours, times["peer"], PEER_FLOOR))
        times = race(
            {"native": [lambda: everything(layer)], "peer": [lambda: peer(layer, True)]}, quick
        )
        rows.append(compared("… and all else", times["native"], times["peer"], PEER_FLOOR))
    return rows


def compared(name: str, native: float, other: float, floor: float | None) -> Row:
    """Make a row of two times."""
    ratio = other / native
    row: Row = {"operation": name, "native": native, "torch": other, "ratio": ratio}
    return row if floor is None else {**row, "floor": floor, "reached": ratio >= floor}


def observing(layer: Layer, dtype: torch.dtype) -> Callable[[], object]:
    """Observe the weight, whose inputs were gathered beforehand."""
    options: dict[str, Any] = {"base_name": "weight", "args": ARGS, "importance": "hessian"}
    observer = Observer.load_from_registry("optimal", **options)
    linear, weight = torch.nn.Linear(layer.weight.shape[1], 1), layer.weight.to(dtype)
    observer.attach(linear)
    linear(layer.inputs)
    observer.detach(linear)
    return lambda: observer(weight)


def everything(layer: Layer) -> Callable[[], object]:
    """Choose scales, and do all that error feedback does."""
    choose, storable = observing(layer, torch.bfloat16), storable_scales(FORMAT, torch.bfloat16)

    def run() -> object:
        found: Any = choose()
        scales = found.get_qparams()["scale"].float()
        curve = curvature(layer.hessian.double(), DAMPING, by_activation=True)
        assert curve is not None
        rounding = Rounding(scales, None, layer.groups, FORMAT)
        return feed_back_errors(layer.weight, curve, rounding, Scales(storable, 1), sweeps=SWEEPS)

    return run


def peer(layer: Layer, searching: bool = False) -> Callable[[], object]:
    """Quantize the layer as llm-compressor does; it works on what it is given."""
    batch = layer.weight.clone()[None], layer.hessian.clone()[None]
    zeros = torch.zeros_like(layer.scales, dtype=torch.int8)
    args = ARGS.model_copy(update={"actorder": "static"}) if searching else ARGS

    def run() -> object:
        scales = layer.scales
        if searching:
            observer = Peer.load_from_registry("memoryless_mse", base_name="weight", args=ARGS)
            scales = observer(layer.weight.bfloat16()).get_qparams()["scale"].float()
        return quantize_weight(
            *batch, scales.clone()[None], zeros[None], None, args, GROUP, DAMPING
        )

    return run


def in_torch(prepare: Callable[[], Callable[[], object]]) -> Callable[[], Callable[[], object]]:
    """Run without the native kernels."""

    def prepare_in_torch() -> Callable[[], object]:
        call = prepare()

        def run() -> object:
            with without_kernels():
                return call()

        return run

    return prepare_in_torch


@contextmanager
def without_kernels() -> Iterator[None]:
    """Turn the native kernels off that are measured here, and no others."""
    with ExitStack() as stack:
        for module, name in (
            (kernels, "feed_back_block"),
            (kernels, "descend_in_place"),
            (kernels, "choose_in_blocks"),
        ):
            reference = getattr(module, name).using("torch")
            stack.enter_context(patch.object(module, name, reference))
        yield


if __name__ == "__main__":
    main()
