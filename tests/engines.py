"""The versions of the kernels that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from calipers.kernels import describe, dispatch

NATIVE_ENGINES = describe().instruction_sets
ENGINES = ("torch", *NATIVE_ENGINES)

native_only = pytest.mark.skipif(not NATIVE_ENGINES, reason="the native kernels are not built")


@contextmanager
def engine_in_use(engine: str) -> Iterator[None]:
    """Let the kernels run in torch, or with one instruction set."""
    if engine == "torch":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "_load", lambda: (None, "a test wants it so"))
            patch.setattr(dispatch, "_warn_once", lambda: None)
            yield
        return
    from calipers.kernels import _native

    before = _native.instruction_set()
    _native.use(engine)
    try:
        yield
    finally:
        _native.use(before)
