"""What transformers cannot do with a checkpoint that is right, and vLLM can."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme
from transformers import PreTrainedModel

from calipers.checkpoint.compression import module_format, scheme_of
from calipers.checkpoint.names import unfused_experts
from calipers.checkpoint.state import own_modules
from calipers.numerics.layout import strategy_name

_DECODED_AS_BFLOAT16 = {
    CompressionFormat.nvfp4_pack_quantized,
    CompressionFormat.mxfp4_pack_quantized,
    CompressionFormat.mxfp8_quantized,
}
_ONE_SCALE = ("tensor", "channel")


def loading_problems(model: PreTrainedModel) -> Iterator[str]:
    """Give a sentence for each thing that goes wrong when transformers loads the checkpoint."""
    schemes = {n: (m, s) for n, m in own_modules(model) if (s := scheme_of(m)) is not None}
    formats = {name: module_format(*pair) for name, pair in schemes.items()}
    small = sorted({form.value for form in formats.values() if form in _DECODED_AS_BFLOAT16})
    if small and model.dtype != torch.bfloat16:
        yield (
            f"transformers decodes {', '.join(small)} to bfloat16, and this model is {model.dtype}:"
            " load the checkpoint with from_pretrained(…, dtype=torch.bfloat16)."
        )
    experts = tuple(f"{name}." for name in unfused_experts(model))
    for form in sorted({form for name, form in formats.items() if name.startswith(experts)}):
        name = next(n for n, f in formats.items() if f is form and n.startswith(experts))
        problem = _expert_problem(form, schemes[name][1])
        if problem:
            yield f"transformers {problem} (here of '{name}'); vLLM can."


def _expert_problem(form: CompressionFormat, scheme: QuantizationScheme) -> str | None:
    """transformers fuses experts while loading, and decodes few formats on the way."""
    weights = scheme.weights
    if form is CompressionFormat.nvfp4_pack_quantized:
        return "loads NVFP4 experts without their global scale, and so computes nonsense"
    if form is CompressionFormat.pack_quantized:
        return None if weights.symmetric else "cannot load experts with zero points"
    if form is CompressionFormat.mxfp4_pack_quantized:
        return None
    if form is CompressionFormat.float_quantized and strategy_name(weights) in _ONE_SCALE:
        return None
    return f"cannot load experts in the format {form.value} per {strategy_name(weights)}"
