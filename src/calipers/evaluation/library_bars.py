"""While checkpoints are loaded and unpacked, one progress bar is enough: ours."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from compressed_tensors.utils import patch_attr
from tqdm import tqdm

_WITH_BARS = (
    "compressed_tensors.compressors.model_compressors.model_compressor",
    "compressed_tensors.distributed.module_parallel",
    "compressed_tensors.offload.dispatch",
    "compressed_tensors.quantization.lifecycle.apply",
)


class _Hidden(tqdm):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


@contextmanager
def hide_library_bars() -> Iterator[None]:
    """Hide the bars of compressed-tensors, which it shows whether or not somebody looks."""
    with ExitStack() as stack:
        for name in _WITH_BARS:
            with suppress(ImportError):  # a file that another version does not have
                stack.enter_context(patch_attr(importlib.import_module(name), "tqdm", _Hidden))
        yield
