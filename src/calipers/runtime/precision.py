"""The dtype and device a model computes in while data runs through it; it keeps its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal, cast, get_args

import torch
from compressed_tensors.offload import OffloadCache, disable_offloading, disable_onloading
from torch import Tensor

from calipers.errors import ConfigurationError, Option, first_line, not_allowed

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
"""How the dtype of a forward pass is chosen: by name, or as suits the model and the device."""

_ALIASES = {
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16", "bfp16"), "bfloat16"),
}
"""What others call these dtypes."""

_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""What a CPU calls the instructions that multiply a dtype; without them float32 is faster."""


def cpu_features() -> Mapping[str, Any]:
    """Return what this CPU can do, by the names that torch has for it."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        capabilities: Mapping[str, Any] = ask()
        return capabilities
    return {"avx512_bf16": torch.cpu._is_avx512_bf16_supported()}


def computes_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device has instructions for a dtype; every accelerator is taken to have them."""
    if device.type != "cpu" or dtype not in _INSTRUCTIONS:
        return True
    features = cpu_features()
    return any(bool(features.get(name)) for name in _INSTRUCTIONS[dtype])


def dtype_choice(given: DtypeChoice | torch.dtype) -> DtypeChoice:
    """Return the name of a choice; what is none is refused.

    >>> dtype_choice(torch.bfloat16)
    'bfloat16'
    """
    name = str(given).removeprefix("torch.")
    if name not in get_args(DtypeChoice):
        raise not_allowed("dtype", name, get_args(DtypeChoice), _ALIASES.get(name.lower()))
    return cast(DtypeChoice, name)


def forward_dtype(choice: DtypeChoice, model: torch.nn.Module, device: torch.device) -> torch.dtype:
    """Return the dtype in which a model computes.

    ``auto`` is the model's own, or float32 on a CPU that has no instructions for that.

    >>> forward_dtype("auto", torch.nn.Linear(2, 2), torch.device("cpu"))
    torch.float32
    """
    if choice != "auto":
        dtype: torch.dtype = getattr(torch, choice)
        return dtype
    own = own_dtype(model) or torch.float32
    return own if computes_fast(own, device) else torch.float32


def own_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype in which a module, or else its parts, hold their numbers."""
    with disable_onloading():
        dtypes = (parameter.dtype for parameter in module.parameters())
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def usable_device(device: torch.device | str | None) -> torch.device | None:
    """Return a device on which something can be computed."""
    if device is None:
        return None
    try:
        usable = torch.device(device)
        float(torch.ones(1, device=usable).sum())
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"cannot be used: {first_line(str(error))}",
            subject=Option("device", str(device)),
            hint="Give a device of torch such as 'cpu' or 'cuda:0', or leave it out to compute "
            "where the model is",
        ) from error
    return usable


def free_memory(device: torch.device) -> int:
    """Return how many bytes a device has left for us."""
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free)
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as lines:
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    return sys.maxsize  # nobody tells


@contextmanager
def onloaded(
    modules: Iterable[torch.nn.Module], device: torch.device, *, recurse: bool = True
) -> Iterator[None]:
    """Have the tensors of modules on a device; afterwards they are where, and what, they were."""
    with ExitStack() as stack:
        originals = []
        for module in (m for each in modules for m in (each.modules() if recurse else [each])):
            if isinstance(module._parameters, OffloadCache):
                stack.enter_context(disable_offloading())
                continue
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.device != device:
                    originals.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(device)
        try:
            yield
        finally:
            for tensor, data in originals:
                tensor.data = data


@contextmanager
def computing_in(
    dtype: torch.dtype | None, modules: Iterable[torch.nn.Module], *, recurse: bool = True
) -> Iterator[None]:
    """Have the tensors of modules in a dtype; afterwards they are the very ones they were.

    None leaves them as they are. Buffers are never made narrower: transformers keeps those of
    positions in float32.
    """
    if dtype is None:
        yield
        return
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        for module in (m for each in modules for m in (each.modules() if recurse else [each])):
            buffers = [b for b in module._buffers.values() if b is not None]
            narrow = [b for b in buffers if b.dtype.itemsize < dtype.itemsize]
            for tensor in (*module._parameters.values(), *narrow):
                if tensor is not None and _computes(tensor) and tensor.dtype != dtype:
                    originals.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


def bytes_of_copies(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Return what a model takes, beside itself, that computes in a dtype on a device."""
    with disable_onloading():
        parameters = [p for p in model.parameters() if _computes(p)]
    copied = (p for p in parameters if p.dtype != dtype or p.device != device)
    return sum(parameter.numel() * dtype.itemsize for parameter in copied)


def _computes(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that are computed with, not codes of a quantized one."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1
