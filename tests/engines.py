"""The versions of the kernels that this machine can run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from pairwise import pairwise

from calipers.kernels import describe
from calipers.kernels.operations import SWITCH, chosen_backends

NATIVE_ENGINES = describe().instruction_sets
ENGINES = ("torch", *NATIVE_ENGINES)
FAST_ENGINES = ("torch", *NATIVE_ENGINES[-1:])
"""The reference, and what this machine uses; what older ones would use is for the slow tests."""

native_only = pytest.mark.skipif(not NATIVE_ENGINES, reason="the native kernels are not built")


def with_engines(
    names: str, *parameters: Sequence[Any], engines: Sequence[str] = ENGINES
) -> pytest.MarkDecorator:
    """Let any two values of parameters meet, and each meet every version of the kernels.

    :param names: the names of the parameters, with commas between them
    """
    rows = [pytest.param(*row, marks=_marks(row[0])) for row in pairwise(engines, *parameters)]
    return pytest.mark.parametrize(
        ("engine", *names.split(", ")), rows, indirect=["engine"], ids=_id_of
    )


def each_engine(engines: Sequence[str] = ENGINES) -> list[Any]:
    """Return versions of the kernels, of which some are for the slow tests."""
    return [pytest.param(engine, marks=_marks(engine)) for engine in engines]


def _marks(engine: str) -> list[pytest.MarkDecorator]:
    return [] if engine in FAST_ENGINES else [pytest.mark.slow]


def _id_of(value: Any) -> str | None:
    return str(value) if isinstance(value, tuple) else None


@contextmanager
def threads_in_use(count: int) -> Iterator[None]:
    """Let torch and the kernels have so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def backends_in_use(names: str) -> Iterator[None]:
    """Let backends be chosen anew, as in a process with this CALIPERS_BACKEND."""
    with mock.patch.dict(os.environ, {SWITCH: names}):
        chosen_backends.cache_clear()
        try:
            yield
        finally:
            chosen_backends.cache_clear()


@contextmanager
def engine_in_use(engine: str) -> Iterator[None]:
    """Let the kernels run in torch, or with one instruction set."""
    if engine == "torch":
        with backends_in_use("torch"):
            yield
        return
    from calipers.kernels import _native

    before = _native.instruction_set()
    _native.use(engine)
    try:
        yield
    finally:
        _native.use(before)
