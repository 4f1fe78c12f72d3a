"""The presets: what each means, what it takes in a checkpoint, and when to use it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization import initialize_module_for_quantization as initialize

from calipers.checkpoint.sizes import sizes_of_module
from calipers.options import IGNORED_BY_DEFAULT
from calipers.planning.specs import TensorSpec, tensor_specs
from calipers.recipes import load_recipe
from calipers.steps.choices import PRESETS, args_to_data, preset, preset_name, scheme_to_data
from calipers.steps.targets import runs_on

_WIDTH = 4096
_TOO_FEW = "for research: too few bits for most models"
_STORED_IN_8 = "for research: few bits in arithmetic, but stored in 8"
_WHEN = {
    "UNQUANTIZED": "in a recipe, to leave modules as they are",
    "W4A16": "the usual choice: a quarter of the size, fast with few requests at a time",
    "W4A16_ASYM": "as W4A16, where weights are not centred on zero; a little larger",
    "W3A16": "where W4A16 is too large; with optimal,importance=hessian",
    "W8A16": "half of the size, hardly any loss",
    "W8A8": "many requests at a time, on GPUs without fp8 and on CPUs",
    "W8A8_STATIC": "as W8A8 with one measured scale for all tokens, which a large value spoils",
    "INT8": "another name for W8A8",
    "W4A8": "4-bit weights in 8-bit arithmetic, where there are kernels for it; stored in 8 bits",
    "W4AFP8": "as W4A8, with fp8 arithmetic",
    "FP8": "many requests at a time, on GPUs with fp8 (Ada, Hopper and newer); static",
    "FP8_DYNAMIC": "as FP8 without data, and safer: each token has a scale of its own",
    "FP8_BLOCK": "as FP8_DYNAMIC, with scales by block as DeepSeek-V3 has them",
    "NVFP4": "4-bit arithmetic, on Blackwell",
    "NVFP4A16": "4-bit floats with fine scales, weights alone",
    "MXFP4": "4-bit arithmetic in the open MX format",
    "MXFP4A16": "4-bit floats in the open MX format, weights alone; loses more than NVFP4A16",
    "MXFP8": "8-bit arithmetic in the open MX format",
    "MXFP8A16": "8-bit floats in the open MX format, weights alone",
    "W2A16": _TOO_FEW,
    **dict.fromkeys(("W5A16", "W6A16", "W7A16"), "between W4A16 and W8A16 in size and loss"),
    **dict.fromkeys(("W2A4", "W2A8", "W3A4", "W3A8", "W4A4"), _STORED_IN_8),
    **dict.fromkeys(("W5A8", "W6A8", "W7A8"), _STORED_IN_8),
}


@dataclass(frozen=True)
class PresetInfo:
    """What there is to say about a preset.

    :param bits: per weight in the checkpoint, scales included
    :param needs_data: whether activations must be measured
    :param runs_on: where it runs, with what it takes there
    :param scheme: the whole of it as plain data
    :param recipe: a recipe that does the same
    """

    name: str
    weights: str
    activations: str
    bits: float
    needs_data: bool
    when: str
    runs_on: dict[str, str]
    scheme: dict[str, Any]
    recipe: str

    @classmethod
    def of(cls, name: str) -> PresetInfo:
        """Look at the scheme that a preset stands for."""
        name = preset_name(name)
        scheme = preset(name, ("Linear",))
        tensors = {tensor.base_name: tensor for tensor in tensor_specs(scheme)}
        return cls(
            name=name,
            weights=_described(tensors.get("weight")),
            activations=_described(tensors.get("input")),
            bits=_bits_per_weight(scheme),
            needs_data=any(tensor.needs_data for tensor in tensors.values()),
            when=_WHEN.get(name, ""),
            runs_on=runs_on(name),
            scheme=scheme_to_data(scheme),
            recipe=_recipe(scheme),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(PRESETS)


def _described(tensor: TensorSpec | None) -> str:
    """Say how a tensor is quantized: ``int4, group 128``, ``float8, token, dynamic``."""
    if tensor is None:
        return "–"
    dynamic = {True: ["dynamic"], "local": ["dynamic scales"]}.get(tensor.args.dynamic, [])
    return ", ".join([tensor.format, tensor.strategy, *dynamic])


def _bits_per_weight(scheme: QuantizationScheme) -> float:
    """Look at what would be stored of a layer of a common size."""
    layer = torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device="meta", dtype=torch.bfloat16)
    initialize(layer, scheme)
    layer.quantization_status = QuantizationStatus.FROZEN
    sizes = sizes_of_module(layer)
    return 8 * sum(n for name, n in sizes.items() if name.startswith("weight")) / _WIDTH**2


def _recipe(scheme: QuantizationScheme) -> str:
    tensors = {
        key: args_to_data(args)
        for key in ("weights", "input_activations")
        if (args := getattr(scheme, key)) is not None
    }
    if not tensors:
        return ""
    modifier = {"ignore": list(IGNORED_BY_DEFAULT), **tensors}
    return load_recipe({"modifiers": [{"QuantizationModifier": modifier}]}).to_yaml()
