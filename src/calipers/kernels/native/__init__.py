"""The native backend: C++ kernels for CPUs, in ``cpp/``, compiled to ``calipers.kernels._native``.

``CALIPERS_NATIVE`` in the environment: ``0`` turns it off; the name of an instruction set
(``generic``, ``avx2``, ``avx512``; on ARM ``neon``) makes it use that one.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from calipers.errors import ConfigurationError
from calipers.kernels.operations import Accepts, Backend, Status
from calipers.numerics.formats import Grid

__all__ = ["BACKEND", "library", "numbers_of"]

SWITCH = "CALIPERS_NATIVE"


class Library:
    """The functions of the native module, which read and write the memory of tensors.

    Every tensor goes through here on its way to them, by the name of its argument. A view with
    torch's negative bit, such as ``torch.imag(z.conj())``, has the opposite sign in memory: it is
    replaced by a copy.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            for key, value in kwargs.items():
                if isinstance(value, Tensor) and value.is_neg():
                    kwargs[key] = value.resolve_neg()
            return function(*args, **kwargs)

        setattr(self, name, call)
        return call


@cache
def library() -> Library:
    """Return the native module; it is loaded, and its instruction set chosen, when asked first."""
    from calipers.kernels import _native

    wanted = os.environ.get(SWITCH, "")
    if wanted not in ("", "0", "1"):
        if wanted not in _native.instruction_sets():
            allowed = ", ".join(_native.instruction_sets())
            raise ConfigurationError(
                f"{SWITCH}={wanted}: this machine has {allowed}. Use one of them, 1 for the best "
                "of them, or 0 for none."
            )
        _native.use(wanted)
    return Library(_native)


def numbers_of(grid: Grid) -> Any:
    """Return the numbers of a format, as the native functions take them."""
    return library().Numbers(grid.native_name, *grid.limits)


@cache
def _status() -> Status:
    wanted = os.environ.get(SWITCH, "")
    if wanted == "0":
        return Status(False, f"{SWITCH}=0 is set")
    if importlib.util.find_spec("calipers.kernels._native") is None:
        reason = "they were not built when it was installed"
        return Status(
            False,
            reason,
            f"Calipers runs without its native kernels, many times slower: {reason}. Install it "
            f"again where there is a C++ compiler, or set {SWITCH}=0 to silence this.",
        )
    library()
    best = wanted in ("", "1")
    return Status(True, "the best this machine has" if best else f"{SWITCH}={wanted} is set")


@cache
def _grids() -> tuple[str, ...]:
    return tuple(library().grids())


BACKEND = Backend(
    "native",
    Accepts(
        devices=("cpu",),
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
        highest_norm=8.0,  # beyond, the errors of 8-bit formats leave float32
        grids=_grids,
    ),
    package=__name__,
    status=_status,
    details=lambda: {
        "instruction_set": library().instruction_set(),
        "instruction_sets": tuple(library().instruction_sets()),
    },
)
