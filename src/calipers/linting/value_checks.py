"""Whether the values of scales, zero points, codes and other tensors make sense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from torch import Tensor

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_module import FLOATS, SIDES, StoredModule
from calipers.files.safetensors_header import StoredTensor
from calipers.kernels.reductions import extrema
from calipers.kernels.resources import runs
from calipers.kernels.rounding import IN_WORDS
from calipers.linting.codes import grid_of
from calipers.linting.results import Finding, Severity
from calipers.topology.names import fused_groups

_AGAIN = "Quantize this module again; look at its weight and at the data of the calibration."
_MX_NAN = 255
_MX_ONE = 127


class _Kinds(NamedTuple):
    """How many scales are of each kind that a scale must not be."""

    nan: int
    inf: int
    zero: int
    negative: int
    denormal: int
    total: int
    all_ones: bool


def check_scales(module: StoredModule) -> Iterator[Finding]:
    """Find scales that are no normal numbers, have a sign of no use, or that nobody computed."""
    for local, stored in _parameters(module, ("scale", "global_scale")):
        if stored.dtype in (*FLOATS, torch.float8_e4m3fn, torch.uint8) and stored.size:
            kinds = _kinds(stored.map())
            if local == "weight_scale" and _takes_signed_scales(module.weights):
                kinds = kinds._replace(negative=0)
            yield from _judge(f"{module.name}.{local}", kinds, local.startswith("weight"))


def _takes_signed_scales(args: QuantizationArgs | None) -> bool:
    """Whether a negative scale is of use: it lets the lowest integer stand for a positive value."""
    if args is None:
        return False
    return args.symmetric and QuantizationType(args.type) is QuantizationType.INT


def _parameters(module: StoredModule, kinds: tuple[str, ...]) -> Iterator[tuple[str, StoredTensor]]:
    for local in (f"{side}_{kind}" for side in SIDES for kind in kinds):
        if local in module.tensors:
            yield local, module.tensors[local]


def _kinds(scale: Tensor) -> _Kinds:
    if scale.dtype == torch.uint8:  # exponents
        nan, least = int((scale == _MX_NAN).sum()), int((scale == 0).sum())
        return _Kinds(nan, 0, 0, 0, least, scale.numel(), bool((scale == _MX_ONE).all()))
    values = scale.float() if scale.dtype.itemsize == 1 else scale
    tiny = 0.0 if scale.dtype.itemsize == 1 else torch.finfo(scale.dtype).tiny
    low, high = values.amin(), values.amax()
    if bool((low > 0) & (low >= tiny) & torch.isfinite(high)):
        return _Kinds(0, 0, 0, 0, 0, values.numel(), bool(low == 1) and bool(high == 1))
    size = values.abs()
    return _Kinds(
        nan=int(values.isnan().sum()),
        inf=int(values.isinf().sum()),
        zero=int((values == 0).sum()),
        negative=int((values < 0).sum()),
        denormal=int(((size > 0) & (size < tiny)).sum()),
        total=values.numel(),
        all_ones=False,
    )


def _judge(name: str, kinds: _Kinds, of_weight: bool) -> Iterator[Finding]:
    grave: tuple[tuple[str, int, str, Severity], ...] = (
        ("nan", kinds.nan, "NaN", "error"),
        ("inf", kinds.inf, "infinite", "error"),
        ("zero", kinds.zero, "zero", "error"),
        (
            "negative",
            kinds.negative,
            "negative, which only weights of symmetric integers have a use for",
            "warning" if of_weight else "error",
        ),
        ("denormal", kinds.denormal, "denormal, which GPUs may take for zero", "warning"),
    )
    for kind, count, words, severity in grave:
        if count:
            share = (
                "is" if kinds.total == 1 else f"has {count:,} of {kinds.total:,} values that are"
            )
            yield Finding(severity, f"scale-{kind}", name, f"{share} {words}", _AGAIN)
    if kinds.all_ones:
        problem = "is exactly 1.0" if kinds.total == 1 else "holds nothing but exactly 1.0"
        hint = "That is what parameters have before anything is measured: calibrate again."
        yield Finding("warning", "scale-default", name, problem, hint)


def check_zero_points(module: StoredModule) -> Iterator[Finding]:
    """Find zero points that no code stands for, and those of something symmetric."""
    if module.weights is not None and not module.is_sound:
        return
    args_of = dict(module.sides)
    is_packed = module.form in IN_WORDS
    for local, stored in _parameters(module, ("zero_point",)):
        args = args_of.get(local.removesuffix("_zero_point"))
        if args is None or not stored.size:
            continue
        name, values = f"{module.name}.{local}", stored.map()
        if args.symmetric:
            yield _zero_point_of_symmetric(name, bool((_as_numbers(values) != 0).any()))
        elif stored.dtype == torch.int32 and local == "weight_zero_point" and is_packed:
            assert module.shape is not None
            yield from _padding(name, values.movedim(-2, -1), args, module.shape[-2])
        else:
            yield from _zero_points_in_range(name, _as_numbers(values), args)


def _as_numbers(values: Tensor) -> Tensor:
    return values.float() if values.dtype.is_floating_point else values


def _zero_point_of_symmetric(name: str, has_values: bool) -> Finding:
    if has_values:
        problem = "has values other than 0, and its scheme is symmetric"
        hint = "Correct 'symmetric' of the config: readers that ignore it compute other weights."
        return Finding("error", "zero-point-symmetric", name, problem, hint)
    problem = "is stored, and its scheme is symmetric: it needs none"
    hint = "vLLM refuses unknown parameters: remove it."
    return Finding("warning", "zero-point-symmetric", name, problem, hint)


def _zero_points_in_range(name: str, values: Tensor, args: QuantizationArgs) -> Iterator[Finding]:
    grid = grid_of(args)
    if grid is None:
        return
    low, high = grid.limits
    outside = int((~((values >= low) & (values <= high))).sum())
    if outside:
        problem = f"has {outside:,} of {values.numel():,} values outside of {low:g} to {high:g}"
        yield Finding("error", "zero-point-range", name, problem, _AGAIN)


def check_padding(module: StoredModule) -> Iterator[Finding]:
    """Find bits behind the last code of a row that are not zero."""
    codes, args, shape = module.codes, module.weights, module.shape
    if module.is_sound and module.form in IN_WORDS:
        assert codes is not None
        assert args is not None
        assert shape is not None
        yield from _padding(f"{module.name}.weight_packed", codes.map(), args, shape[-1])


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
    for local, stored in module.tensors.items():
        plain = stored.dtype in FLOATS and not local.endswith(("_scale", "_zero_point"))
        if plain and stored.size:
            values = stored.map()
            if _count_nonfinite(values):
                name = f"{module.name}.{local}".lstrip(".")
                yield from _not_finite(name, values)


def _count_nonfinite(values: Tensor) -> int:
    return sum(extrema(part.reshape(1, 1, 1, -1)).nonfinite for part in _parts(values))


def _parts(values: Tensor) -> Iterator[Tensor]:
    flat = values.reshape(-1)
    return (flat[part] for part in runs(flat.numel()))


def _not_finite(name: str, values: Tensor) -> Iterator[Finding]:
    counts = {
        "nan": sum(int(part.isnan().sum()) for part in _parts(values)),
        "inf": sum(int(part.isinf().sum()) for part in _parts(values)),
    }
    hint = "Look at the model that the checkpoint was made from."
    for kind, count in counts.items():
        if count:
            problem = f"has {count:,} of {values.numel():,} values that are {kind}"
            yield Finding("error", f"tensor-{kind}", name, problem, hint)


def check_fused(checkpoint: QuantizedCheckpoint) -> Iterator[Finding]:
    """Find layers that run as one matrix and have different global scales."""
    by_name = checkpoint.modules
    for group in fused_groups(by_name):
        for local in ("weight_global_scale", "input_global_scale"):
            scales = {name: _single(by_name[name], local) for name in group}
            known = {name: scale for name, scale in scales.items() if scale is not None}
            if len(set(known.values())) > 1:
                yield _different(group[0].rpartition(".")[0], local, known)


def _single(module: StoredModule, local: str) -> float | None:
    stored = module.tensors.get(local)
    if stored is None or stored.dtype not in FLOATS or stored.size != stored.dtype.itemsize:
        return None
    value = float(stored.read().item())
    return value if value == value else None


def _different(parent: str, local: str, scales: dict[str, float]) -> Finding:
    told = ", ".join(f"{n.rpartition('.')[2]} {scale:g}" for n, scale in scales.items())
    problem = f"has layers that run as one matrix with different {local}: {told}"
    hint = "vLLM needs one for all of them: quantize them together."
    return Finding("error", "fused-global-scale", parent, problem, hint)
