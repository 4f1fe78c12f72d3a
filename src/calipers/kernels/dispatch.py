"""Which version of a kernel runs: the native one, or the one in torch.

The native one serves float32, float16 and bfloat16 on a CPU, if it was built, and the formats that
it has a row for; the one in torch serves everything else, and is what the native one is tested
against.
``CALIPERS_NATIVE=0`` in the environment turns the native kernels off; the name of an instruction
set (``generic``, ``avx2``, ``avx512``; on ARM ``neon``) makes them use that one.
"""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from calipers.errors import CalipersWarning, ConfigurationError
from calipers.numerics.formats import Format

SWITCH = "CALIPERS_NATIVE"
HIGHEST_NATIVE_NORM = 8.0  # beyond, the errors of 8-bit formats leave float32
NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPERATIONS = (
    "extrema",
    "search",
    "optimum",
    "sum_of_squares",
    "sum_of_products",
    "count_values",
    "summarize_channels",
    "quantize",
    "feed_back",
    "descend",
    "choose_together",
    "pack",
)


@dataclass(frozen=True)
class KernelReport:
    """What runs where, and why."""

    native: bool
    reason: str
    instruction_set: str | None
    instruction_sets: tuple[str, ...]
    threads: int

    def __str__(self) -> str:
        elsewhere = "torch on other devices and for other dtypes"
        names = ", ".join(OPERATIONS)
        if not self.native:
            return f"{names}: torch everywhere, without native kernels: {self.reason}"
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in NATIVE_DTYPES)
        return (
            f"{names}: native on the CPU for {dtypes}; {elsewhere}\n"
            f"instruction set: {self.instruction_set} ({self.reason}), "
            f"threads: {self.threads} (torch.get_num_threads)"
        )


class NativeKernels:
    """The functions of the native module, which read and write the memory of tensors.

    Every tensor goes through here on its way to them. A view with torch's negative bit, such as
    ``torch.imag(z.conj())``, has the opposite sign in memory: it is replaced by a copy.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _resolving(getattr(self._module, name))
        setattr(self, name, function)
        return function


def _resolving(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        return function(*[x.resolve_neg() if isinstance(x, Tensor) else x for x in given])

    return call


def describe() -> KernelReport:
    """Say which kernels run, and why.

    >>> describe().threads == torch.get_num_threads()
    True
    """
    kernels, reason = _load()
    return KernelReport(
        native=kernels is not None,
        reason=reason,
        instruction_set=kernels.instruction_set() if kernels else None,
        instruction_sets=tuple(kernels.instruction_sets()) if kernels else (),
        threads=torch.get_num_threads(),
    )


def native_for(
    values: Tensor, fmt: Format | None = None, norm: float = 2.0
) -> NativeKernels | None:
    """Return the native kernels if they can work on this tensor, in this format, by this norm."""
    if not values.is_cpu or values.dtype not in NATIVE_DTYPES or not values.numel():
        return None
    if norm > HIGHEST_NATIVE_NORM or not _has_memory(values):
        return None
    kernels = _load()[0]
    if kernels is None:
        _warn_once()
        return None
    return kernels if fmt is None or fmt.grid.native_name in kernels.grids() else None


def as_grid(pieces: Tensor, *, ordered: bool = False) -> Tensor:
    """Bring pieces into the five dimensions of the native kernels, without a copy if possible.

    ``ordered`` keeps the order of the values within a piece, which most operations do not need.
    """
    pieces = pieces.detach()
    observations, *grid, rows, columns = pieces.shape
    last = grid[-1] if grid else 1
    five = pieces.reshape(observations, math.prod(grid[:-1]), last, rows, columns)
    if not ordered and rows > 1 and five.stride(-2) < five.stride(-1):
        return five.transpose(-1, -2)
    return five


def geometry(pieces: Tensor) -> tuple[Tensor, Sequence[int], Sequence[int]]:
    """Return what ``as_grid`` does as sizes and strides, and the tensor whose memory they are of.

    No tensor is made for it, which counts where tensors are small.
    """
    if pieces.ndim > 5 or pieces.is_neg():  # the address of the latter's memory would be taken
        grid = as_grid(pieces.resolve_neg())
        return grid, grid.shape, grid.stride()
    (observations, *sizes), (step, *steps) = pieces.shape, pieces.stride()
    missing = (1,) * (4 - len(sizes))
    shape, strides = (observations, *missing, *sizes), (step, *missing, *steps)
    if shape[3] > 1 and strides[3] < strides[4]:
        shape, strides = (*shape[:3], shape[4], shape[3]), (*strides[:3], strides[4], strides[3])
    return pieces, shape, strides


def _has_memory(values: Tensor) -> bool:
    """Whether there are numbers to be read; distributed, fake and traced tensors have none."""
    if type(values) not in (Tensor, torch.nn.Parameter) or values.layout != torch.strided:
        return False
    try:
        return values.data_ptr() != 0
    except RuntimeError:
        return False


@cache
def _load() -> tuple[NativeKernels | None, str]:
    wanted = os.environ.get(SWITCH, "")
    if wanted == "0":
        return None, f"{SWITCH}=0 is set"
    if importlib.util.find_spec("calipers.kernels._native") is None:
        return None, "they were not built when it was installed"
    from calipers.kernels import _native

    kernels = NativeKernels(_native)
    if wanted in ("", "1"):
        return kernels, "the best this machine has"
    if wanted not in kernels.instruction_sets():
        allowed = ", ".join(kernels.instruction_sets())
        raise ConfigurationError(
            f"{SWITCH}={wanted}: this machine has {allowed}. Use one of them, 1 for the best of "
            "them, or 0 for none."
        )
    kernels.use(wanted)
    return kernels, f"{SWITCH}={wanted} is set"


@cache
def _warn_once() -> None:
    if os.environ.get(SWITCH) != "0":
        warnings.warn(
            f"Calipers runs without its native kernels, many times slower: {_load()[1]}. "
            f"Install it again where there is a C++ compiler, or set {SWITCH}=0 to silence this.",
            CalipersWarning,
            stacklevel=4,
        )
