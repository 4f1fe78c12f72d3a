"""Whether the values of scales, zero points, codes and other tensors make sense."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from torch import Tensor

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_module import FLOATS, SIDES, StoredModule
from calipers.files.safetensors_header import StoredTensor
from calipers.kernels.reductions import extrema
from calipers.kernels.resources import runs
from calipers.kernels.rounding import IN_WORDS
from calipers.linting.check import Check, Finding, Severity
from calipers.linting.codes import grid_of
from calipers.topology.names import fused_groups

_AGAIN = "Quantize this module again; look at its weight and at the data of the calibration."
_MX_NAN = 255
_MX_ONE = 127


_BAD_SCALES: dict[str, tuple[str, Severity]] = {
    "nan": ("NaN", "error"),
    "inf": ("infinite", "error"),
    "zero": ("zero", "error"),
    "negative": ("negative, which only weights of symmetric integers have a use for", "error"),
    "denormal": ("denormal, which GPUs may take for zero", "warning"),
}


class ValuesCheck(Check):
    """Look for values of scales, zero points and plain tensors that make no sense."""

    def of_checkpoint(self, checkpoint: QuantizedCheckpoint) -> Iterator[Finding]:
        """Check a checkpoint as a whole."""
        yield from check_fused(checkpoint)

    def of_module(self, module: StoredModule) -> Iterator[Finding]:
        """Check a module of a checkpoint, quantized or not."""
        yield from check_scales(module)
        yield from check_plain(module)
        yield from check_zero_points(module)
        weight = module.open_weight() if module.form in IN_WORDS else None
        if weight is not None:
            name = f"{module.name}.weight_packed"
            yield from _padding(name, weight.codes, weight.args, weight.shape[-1])


def check_scales(module: StoredModule) -> Iterator[Finding]:
    """Find scales that are no normal numbers, have a sign of no use, or that nobody computed."""
    for local, stored in _parameters(module, ("scale", "global_scale")):
        if stored.dtype not in (*FLOATS, torch.float8_e4m3fn, torch.uint8) or not stored.size:
            continue
        scale, name = stored.map(), f"{module.name}.{local}"
        scale = scale.float() if stored.dtype == torch.float8_e4m3fn else scale
        tiny = torch.finfo(stored.dtype).tiny if stored.dtype in FLOATS else 0.0
        for kind, count in _bad_scales(scale, tiny).items():
            words, severity = _BAD_SCALES[kind]
            if kind == "negative" and local.startswith("weight"):
                # A negative scale lets the lowest integer stand for a positive value.
                args = module.weights
                is_signed = args and args.symmetric and args.type == QuantizationType.INT
                if local == "weight_scale" and is_signed:
                    continue
                severity = "warning"
            if count:
                many = f"has {count:,} of {scale.numel():,} values that are"
                problem = f"{'is' if scale.numel() == 1 else many} {words}"
                yield Finding(severity, f"scale-{kind}", name, problem, _AGAIN)
        if bool((scale == (_MX_ONE if scale.dtype == torch.uint8 else 1)).all()):
            problem = "is exactly 1.0" if scale.numel() == 1 else "holds nothing but exactly 1.0"
            hint = "That is what parameters have before anything is measured: calibrate again."
            yield Finding("warning", "scale-default", name, problem, hint)


def _parameters(module: StoredModule, kinds: tuple[str, ...]) -> Iterator[tuple[str, StoredTensor]]:
    for local in (f"{side}_{kind}" for side in SIDES for kind in kinds):
        if local in module.tensors:
            yield local, module.tensors[local]


def _bad_scales(scale: Tensor, tiny: float) -> dict[str, int]:
    """Count the scales of each kind that a scale must not be."""
    if scale.dtype == torch.uint8:  # exponents
        return {"nan": int((scale == _MX_NAN).sum()), "denormal": int((scale == 0).sum())}
    low, high = scale.amin(), scale.amax()
    if bool((low > 0) & (low >= tiny) & torch.isfinite(high)):
        return {}
    size = scale.abs()
    return {
        "nan": int(scale.isnan().sum()),
        "inf": int(scale.isinf().sum()),
        "zero": int((scale == 0).sum()),
        "negative": int((scale < 0).sum()),
        "denormal": int(((size > 0) & (size < tiny)).sum()),
    }


def check_zero_points(module: StoredModule) -> Iterator[Finding]:
    """Find zero points that no code stands for, and those of something symmetric."""
    if module.weights is not None and not module.is_sound:
        return
    args_of = dict(module.sides)
    for local, stored in _parameters(module, ("zero_point",)):
        args = args_of.get(local.removesuffix("_zero_point"))
        if args is None or not stored.size:
            continue
        name, values = f"{module.name}.{local}", stored.map()
        is_packed = stored.dtype == torch.int32 and local == "weight_zero_point"
        if is_packed and module.form in IN_WORDS and not args.symmetric:
            assert module.shape is not None
            yield from _padding(name, values.movedim(-2, -1), args, module.shape[-2])
            continue
        numbers = values.float() if values.dtype.is_floating_point else values
        grid = grid_of(args)
        if args.symmetric and bool((numbers != 0).any()):
            problem = "has values other than 0, and its scheme is symmetric"
            hint = (
                "Correct 'symmetric' of the config: readers that ignore it compute other weights."
            )
            yield Finding("error", "zero-point-symmetric", name, problem, hint)
        elif args.symmetric:
            problem = "is stored, and its scheme is symmetric: it needs none"
            hint = "vLLM refuses unknown parameters: remove it."
            yield Finding("warning", "zero-point-symmetric", name, problem, hint)
        elif grid is not None:
            low, high = grid.limits
            outside = int((~((numbers >= low) & (numbers <= high))).sum())
            if outside:
                share = f"{outside:,} of {numbers.numel():,} values"
                problem = f"has {share} outside of {low:g} to {high:g}"
                yield Finding("error", "zero-point-range", name, problem, _AGAIN)


def _padding(name: str, packed: Tensor, args: QuantizationArgs, count: int) -> Iterator[Finding]:
    """Look at the last word of each row, which ``count`` codes do not fill."""
    rest = count * args.num_bits % 32
    if not rest or not packed.numel():
        return
    last = packed[..., -1].long() & 0xFFFFFFFF
    wrong = int(((last >> rest) != 0).sum())
    if wrong:
        problem = f"has bits behind the last code in {wrong:,} of {last.numel():,} rows"
        hint = "Readers ignore them, but no known writer sets them: look at how it was made."
        yield Finding("warning", "packed-padding", name, problem, hint)


def check_plain(module: StoredModule) -> Iterator[Finding]:
    """Find NaN and Inf in tensors that are not quantized."""
    hint = "Look at the model that the checkpoint was made from."
    for local, stored in module.tensors.items():
        is_plain = stored.dtype in FLOATS and not local.endswith(("_scale", "_zero_point"))
        if not is_plain or not stored.size:
            continue
        values = stored.map().reshape(-1)
        parts = [values[part] for part in runs(values.numel())]
        if not any(extrema(part.view(1, 1, 1, -1)).nonfinite for part in parts):
            continue
        name = f"{module.name}.{local}".lstrip(".")
        for kind, is_kind in (("nan", torch.isnan), ("inf", torch.isinf)):
            count = sum(int(is_kind(part).sum()) for part in parts)
            if count:
                problem = f"has {count:,} of {values.numel():,} values that are {kind}"
                yield Finding("error", f"tensor-{kind}", name, problem, hint)


def check_fused(checkpoint: QuantizedCheckpoint) -> Iterator[Finding]:
    """Find layers that run as one matrix and have different global scales."""
    for group in fused_groups(checkpoint.modules):
        for local in ("weight_global_scale", "input_global_scale"):
            scales = {}
            for name in group:
                stored = checkpoint.modules[name].tensors.get(local)
                if stored is None or stored.dtype not in FLOATS:
                    continue
                if stored.size == stored.dtype.itemsize:
                    scales[name.rpartition(".")[2]] = float(stored.read().item())
            scales = {name: scale for name, scale in scales.items() if not math.isnan(scale)}
            if len(set(scales.values())) > 1:
                named = ", ".join(f"{name} {scale:g}" for name, scale in scales.items())
                problem = f"has layers that run as one matrix with different {local}: {named}"
                hint = "vLLM needs one for all of them: quantize them together."
                parent = group[0].rpartition(".")[0]
                yield Finding("error", "fused-global-scale", parent, problem, hint)
