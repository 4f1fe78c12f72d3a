"""Write a frozen model as a compressed-tensors checkpoint, whole or not at all.

Tensors are streamed into safetensors files of bounded size; none is kept.
"""

from __future__ import annotations

import json
import os
import queue
import re
import struct
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors.torch import _TYPES
from torch import Tensor
from transformers import PreTrainedModel

from calipers.checkpoint.auxiliary_files import (
    check_apart,
    write_auxiliary_files,
    write_json,
    write_notes,
)
from calipers.checkpoint.compression import (
    check_frozen,
    checkpoint_tensors,
    estimated_size,
    tensor_names,
)
from calipers.checkpoint.config import checkpoint_config, loading_problems
from calipers.checkpoint.headers import INDEX, SINGLE
from calipers.checkpoint.output import FinishedShard, Journal, free_space, output_folder
from calipers.checkpoint.state import StoredNames
from calipers.errors import CalipersWarning, CheckpointError, ConfigurationError, Option
from calipers.runtime.progress import Progress

_MEGABYTE = 1e6
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_BARE = 64
_MOST_ROOM = 1 << 20
_DTYPES = {dtype: name for name, dtype in _TYPES.items()} | {torch.float8_e8m0fnu: "F8_E8M0"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
T = TypeVar("T")


def write_checkpoint(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    recipe: str,
    tokenizer: Any = None,
    notes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> Path:
    """Write a frozen model to a folder that transformers and vLLM load, and return its path.

    The model is not changed. A run that fails leaves no folder, or the one that was there.

    :param recipe: the text of recipe.yaml
    :param tokenizer: what is saved beside the model; None: the files of the model's own folder
    :param notes: what calipers.json says besides the version of Calipers
    :param overwrite: whether a checkpoint that is there already may be replaced
    :param max_shard_size: the largest size of a file of tensors, in bytes or as ``"5GB"``
    :param progress: shows how far it is
    """
    names = tensor_names(model)
    shown = progress or Progress(False)

    def counted(_: Mapping[str, Any]) -> Generator[tuple[str, Tensor], None, None]:
        total = estimated_size(model, names) / _MEGABYTE
        with shown.counting("writing the checkpoint", total, "MB") as add:
            for name, tensor in checkpoint_tensors(model, names):
                yield name, tensor
                add(tensor.nbytes / _MEGABYTE)

    return write_stream(
        model,
        names,
        TensorStream(counted, lambda: notes or {}),
        directory,
        recipe=recipe,
        tokenizer=tokenizer,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
    )


@dataclass(frozen=True)
class TensorStream:
    """The tensors of a checkpoint as they are made.

    :param tensors: gives them, under their names on disk, from what ``state`` returned for the
        last finished file of a run that was killed
    :param notes: returns what calipers.json says besides, when all tensors are made
    :param arguments: what a run must share with one that was killed to go on with it; None: it
        begins anew
    :param state: returns what a run needs to go on behind a tensor, as plain data
    """

    tensors: Callable[[Mapping[str, Any]], Generator[tuple[str, Tensor], None, None]]
    notes: Callable[[], Mapping[str, Any]]
    arguments: Mapping[str, Any] | None = None
    state: Callable[[str], Mapping[str, Any]] = lambda _: {}


def write_stream(
    model: PreTrainedModel,
    names: StoredNames,
    stream: TensorStream,
    directory: str | os.PathLike[str],
    *,
    recipe: str,
    tokenizer: Any = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write the tensors of a frozen model, whose own may have no values, and all files beside.

    :param names: where each tensor of the model goes
    """
    check_apart(directory, model)
    path = Path(os.path.realpath(directory))
    shard_size = parse_size(max_shard_size)
    check_frozen(model)
    needed, free = estimated_size(model, names), free_space(path)
    if needed > free:
        raise CheckpointError(
            f"The checkpoint needs about {needed / 1e9:,.3f} GB, but the disk of '{path}' has "
            f"{free / 1e9:,.3f} GB free. Nothing was written",
            hint="Free some space, or choose a folder on another disk.",
        )
    config = checkpoint_config(model)
    for problem in loading_problems(model):
        warnings.warn(str(problem), CalipersWarning, stacklevel=3)
    with output_folder(path, overwrite, stream.arguments) as journal:
        room = header_room([*names.renamed.values(), *names.converted])
        noted = None if stream.arguments is None else journal
        writer = ShardWriter(journal.folder, shard_size, room, noted, stream.state)
        with closing(stream.tensors(journal.state)) as tensors:
            writer.write(tensors)
        files = write_auxiliary_files(model, journal.folder, recipe=recipe, tokenizer=tokenizer)
        write_notes(journal.folder, files, stream.notes())
        write_json(journal.folder / "config.json", config)
    return path


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
            "is no size",
            subject=Option("max_shard_size", size),
            hint="Give bytes, or a number with a unit: '5GB'.",
        )
    unit = _UNITS[match[2].upper()]
    binary = 1024 ** list(_UNITS.values()).index(unit)
    return int(number * (binary if match[3] else unit))


@dataclass
class Shard:
    """One file: the length of its header, the header with a place for each tensor, the tensors.

    The header comes first and is known last, so room is left for it; what it does not need is
    filled with blanks, as the format allows. Tensors may not have gaps between them, and readers
    want each at a multiple of the size of its numbers: the few of odd length wait for the end.
    """

    file: BinaryIO
    room: int
    header: dict[str, Any] = field(default_factory=lambda: {"__metadata__": {"format": "pt"}})
    size: int = 0
    last: str = ""
    _header_size: int = _BARE
    _waiting: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Leave room for the header."""
        self.file.write(b" " * (_LENGTH.size + self.room))

    def has_room_for(self, name: str, size: int, max_size: int) -> bool:
        """Whether one more tensor fits into the file, and its name into the header."""
        is_listed = self._header_size + _entry_size(name) <= self.room
        return is_listed and self.size + size <= max_size

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, now or at the end."""
        self._header_size += _entry_size(name)
        self.size += tensor.nbytes
        self.last = name
        if tensor.nbytes % _ALIGNMENT:
            self._waiting.append((name, tensor.clone()))
        else:
            self._write(name, tensor)

    def finish(self) -> None:
        """Write what has waited, and the header."""
        for name, tensor in sorted(self._waiting, key=lambda pair: -pair[1].element_size()):
            self._write(name, tensor)
        text = json.dumps(self.header, separators=(",", ":"), ensure_ascii=False).encode()
        self.file.seek(0)
        self.file.write(_LENGTH.pack(self.room) + text)
        self.file.close()

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        start = self.file.tell()
        begin = start - _LENGTH.size - self.room
        # A memoryview of the bytes: no copy is made of a tensor that is in memory as a whole.
        self.file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self.header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        if hasattr(os, "posix_fadvise"):  # the disk begins now: little is left for fsync
            advice = os.POSIX_FADV_DONTNEED
            os.posix_fadvise(self.file.fileno(), start, tensor.nbytes, advice)


@dataclass
class ShardWriter:
    """Writes tensors in the order in which they come.

    :param room: the bytes that the header of a file may take; a file whose header is full ends
    :param journal: where each finished file is noted; what it has noted is not written again
    :param state: returns what a run needs to go on behind a tensor
    """

    folder: Path
    max_size: int
    room: int = _MOST_ROOM
    journal: Journal | None = None
    state: Callable[[str], Mapping[str, Any]] = lambda _: {}
    _open: Shard | None = None
    _shards: list[FinishedShard] = field(default_factory=list)

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write all tensors, and the index if there is more than one shard."""
        done: set[str] = set()
        if self.journal is not None:
            self._shards, done = list(self.journal.shards), self.journal.tensors
        try:
            for name, tensor in tensors:
                if name in done:
                    continue
                current = self._open
                if current is None or not current.has_room_for(name, tensor.nbytes, self.max_size):
                    self._end_shard()
                    path = self.folder / f"model-{len(self._shards) + 1:05d}.safetensors"
                    room = max(self.room, _aligned(_BARE + _entry_size(name)))
                    current = self._open = Shard(path.open("wb"), room)
                    current.begin()
                current.add(name, tensor.detach().cpu().contiguous())
            self._end_shard()
        finally:
            if self._open is not None:
                with suppress(OSError):  # there is another error already
                    self._open.file.close()
        if len(self._shards) == 1:
            path = self.folder / self._shards[0].file
            path.rename(self.folder / SINGLE)
            return
        weight_map = {}
        for shard in self._shards:
            path = self.folder / shard.file
            final = f"{path.stem}-of-{len(self._shards):05d}.safetensors"
            path.rename(self.folder / final)
            weight_map.update(dict.fromkeys(shard.tensors, final))
        total = sum(shard.size for shard in self._shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.folder / INDEX).write_text(text, encoding="utf-8")

    def _end_shard(self) -> None:
        if self._open is not None:
            self._open.finish()
            names = [name for name in self._open.header if name != "__metadata__"]
            path = Path(self._open.file.name)
            shard = FinishedShard(path.name, names, self._open.size, path.stat().st_size)
            self._shards.append(shard)
            if self.journal is not None:
                self.journal.add(shard, self.state(self._open.last))
            self._open = None


def header_room(names: Iterable[str]) -> int:
    """Return enough room for tensors of these names, and for as many again that are put to them."""
    return min(_MOST_ROOM, _aligned(_BARE + 2 * sum(map(_entry_size, names))))


def _entry_size(name: str) -> int:
    """Return how many bytes a tensor takes in the header at most, for up to eight dimensions."""
    return len(json.dumps(name, ensure_ascii=False).encode()) + 256


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def in_background(items: Generator[T, None, None], ahead: int = 1) -> Generator[T, None, None]:
    """Give the items of a generator that runs in a thread, at most ``ahead`` of them in advance.

    What it raises is raised here. Closing what is returned waits for the item that is being made.

    >>> list(in_background(number for number in range(3)))
    [0, 1, 2]
    """
    ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(ahead)
    over = threading.Event()

    def put(item: tuple[T] | BaseException | None) -> None:
        while not over.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                break

    def work() -> None:
        torch.set_num_threads(threads)
        try:
            with closing(items):
                for item in items:
                    put((item,))
                    del item  # it may be large, and the next one is about to be made
                    if over.is_set():
                        return
            put(None)
        except BaseException as error:
            put(error)

    threads = torch.get_num_threads()
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
            del item
    finally:
        over.set()
        worker.join()
