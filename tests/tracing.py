"""The files of Calipers that tensors pass, found by a tracer over all calls in all threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import calipers

SOURCE = Path(calipers.__file__).parent
_MODULE_BODY = "<module>"


def files_passed(run: Callable[[], object]) -> list[str]:
    """Return the files with a function on the stack whenever a tensor is given to a function.

    Tensors in a list, a tuple or a mapping count, also one level deeper. The order is that in which
    files are first passed. What runs only while modules are imported does not count: the first of
    two runs has imported them.
    """
    passed: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or _file_of(frame) is None or frame.f_code.co_name == _MODULE_BODY:
            return
        if any(map(_holds_tensor, list(frame.f_locals.values()))):
            passed.update(dict.fromkeys(reversed(list(_files_on_stack(frame)))))

    run()
    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return list(passed)


def _files_on_stack(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        file = _file_of(frame)
        if file is not None:
            yield file
        frame = frame.f_back


def _file_of(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    start = f"{SOURCE}/"
    return path.removeprefix(start) if path.startswith(start) else None


def _holds_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 2 or not isinstance(value, dict | list | tuple):
        return False
    values = value.values() if isinstance(value, dict) else value
    return any(_holds_tensor(each, depth + 1) for each in list(values))
