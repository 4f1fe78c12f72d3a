"""Tensors streamed into safetensors files of bounded size, with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from calipers.errors import ConfigurationError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(size: int | str) -> int:
    """Return a size in bytes.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(100)
    (5000000000, 1572864, 100)
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise ConfigurationError(
            f"max_shard_size={size!r} is no size. Give bytes, or a number with a unit: '5GB'."
        )
    unit = _UNITS[match[2].upper()]
    binary = 1024 ** list(_UNITS.values()).index(unit)
    return int(number * (binary if match[3] else unit))


@dataclass
class ShardWriter:
    """Writes tensors in the order in which they come; one shard is in memory at a time."""

    folder: Path
    max_size: int
    _pending: dict[str, torch.Tensor] = field(default_factory=dict)
    _pending_size: int = 0
    _shards: list[tuple[Path, list[str]]] = field(default_factory=list)
    _storages: set[int] = field(default_factory=set)
    _total: int = 0

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write all tensors, and the index if there is more than one shard."""
        for name, tensor in tensors:
            self._add(name, tensor)
        self._flush()
        self._finish()

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_size + size > self.max_size:
            self._flush()
        self._pending[name] = self._own_memory(tensor)
        self._pending_size += size

    def _own_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the CPU that shares its memory with no other; most are it already."""
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage()
        whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        if not whole or storage.data_ptr() in self._storages:
            tensor = tensor.clone()
        self._storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self.folder / f"model-{len(self._shards) + 1:05d}.safetensors"
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        self._shards.append((path, list(self._pending)))
        self._total += self._pending_size
        self._pending, self._pending_size = {}, 0
        self._storages.clear()

    def _finish(self) -> None:
        if len(self._shards) == 1:
            path, _ = self._shards[0]
            path.rename(self.folder / "model.safetensors")
            return
        weight_map = {}
        for path, names in self._shards:
            final = f"{path.stem}-of-{len(self._shards):05d}.safetensors"
            path.rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
