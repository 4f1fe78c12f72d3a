"""What transformers cannot do with a checkpoint that is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from transformers import PreTrainedModel

from calipers.checkpoint.compression import module_format, scheme_of
from calipers.checkpoint.names import expert_names
from calipers.checkpoint.state import own_modules
from calipers.numerics.layout import strategy_name
from calipers.topology.experts import unfused_experts

_DECODED_AS_BFLOAT16 = {
    CompressionFormat.nvfp4_pack_quantized,
    CompressionFormat.mxfp4_pack_quantized,
    CompressionFormat.mxfp8_quantized,
}
_ONE_SCALE = ("tensor", "channel")


@dataclass(frozen=True)
class LoadingProblem:
    """Something that goes wrong when transformers loads a checkpoint.

    :param cause: a sentence without its full stop
    :param advice: another one
    :param loads_as: the dtype in which nothing goes wrong; None if there is none
    """

    cause: str
    advice: str
    loads_as: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.cause}. {self.advice}"


def loading_problems(model: PreTrainedModel) -> Iterator[LoadingProblem]:
    """Find what goes wrong when transformers loads the checkpoint of a model."""
    schemes = {n: (m, s) for n, m in own_modules(model) if (s := scheme_of(m)) is not None}
    formats = {name: module_format(*pair) for name, pair in schemes.items()}
    small = sorted({form.value for form in formats.values() if form in _DECODED_AS_BFLOAT16})
    if small and model.dtype != torch.bfloat16:
        yield LoadingProblem(
            f"transformers decodes {', '.join(small)} to bfloat16, and this model is {model.dtype}",
            "Load the checkpoint with from_pretrained(…, dtype=torch.bfloat16).",
            loads_as=torch.bfloat16,
        )
    for name, (module, _) in schemes.items():
        if isinstance(module, nn.Embedding) and formats[name].value.endswith("pack-quantized"):
            yield LoadingProblem(
                f"transformers cannot load an Embedding in the format {formats[name].value} (here "
                f"'{name}')",
                "The tensors are complete, for clients that read them.",
            )
    yield from _problems_of_experts(model, {n: (formats[n], s) for n, (_, s) in schemes.items()})


def _problems_of_experts(
    model: PreTrainedModel, quantized: dict[str, tuple[CompressionFormat, QuantizationScheme]]
) -> Iterator[LoadingProblem]:
    """transformers fuses experts while loading, and decodes few formats on the way."""
    known, said = expert_names(model), set()
    for experts in unfused_experts(model):
        if isinstance(model.get_submodule(experts), nn.ModuleList):
            continue  # so it is in transformers, too
        for name in (name for name in quantized if name.startswith(f"{experts}.")):
            missing = "has no place for single experts of this model"
            problem = _expert_problem(*quantized[name]) if name in known else missing
            if problem is not None and problem not in said:
                said.add(problem)
                yield LoadingProblem(
                    f"transformers {problem} (here '{name}')",
                    "The tensors are complete, in the layout of the original checkpoint, for "
                    "clients that read single experts.",
                )


def _expert_problem(form: CompressionFormat, scheme: QuantizationScheme) -> str | None:
    weights = scheme.weights
    if form is CompressionFormat.nvfp4_pack_quantized:
        return "loads NVFP4 experts without their global scale, and so computes nonsense"
    if form is CompressionFormat.pack_quantized and not weights.symmetric:
        return "cannot load experts with zero points"
    plain = form is CompressionFormat.float_quantized and strategy_name(weights) in _ONE_SCALE
    packed = (CompressionFormat.pack_quantized, CompressionFormat.mxfp4_pack_quantized)
    if not plain and form not in packed:
        return f"cannot load experts in the format {form.value} per {strategy_name(weights)}"
    if scheme.input_activations is not None:
        return "does not quantize what goes into experts, so that its results differ a little"
    return None
