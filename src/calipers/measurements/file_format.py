"""Measurements as one safetensors file; docs/measurements.md describes it byte by byte."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from safetensors import safe_open
from torch import Tensor

from calipers.errors import (
    MeasurementsError,
    MergeError,
    damaged_measurements,
    library_errors,
)
from calipers.files.reading import open_regular, parse_json_object
from calipers.files.safetensors_header import StoredTensor, read_header
from calipers.kernels.reductions import BINS
from calipers.kernels.resources import FreedMemory
from calipers.measurements.info import MeasurementsInfo
from calipers.measurements.tensors import (
    Place,
    Statistics,
    Tensors,
    fold_of,
    missing_halves,
    name_of,
    problem_with_folds,
    readers_of,
    statistic_of,
    whole_beside,
)
from calipers.numerics.layout import STRATEGIES
from calipers.statistics.base import Load, Statistic
from calipers.statistics.value_counts import TABLES

if TYPE_CHECKING:
    from io import RawIOBase


class OpenFile:
    """A file that was checked, and is read later.

    It stays open: a file that is moved to its place meanwhile is another one, and does not matter.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self._opened = cast("RawIOBase", open_regular(path, buffering=0))
        self._state = self._present_state()

    def __del__(self) -> None:
        opened = self.__dict__.get("_opened")  # there is none where opening it has failed
        if opened is not None:
            opened.close()

    def read(self, stored: StoredTensor) -> mmap.mmap:
        """Return the bytes of a tensor in pages of their own, which go as soon as they are free."""
        if self._present_state() != self._state:
            raise MeasurementsError(
                "has been changed since it was opened, and what is needed of it now cannot be "
                "trusted",
                subject=f"The file '{self._path}'",
                hint="Start again with the file as it is now.",
            )
        pages = mmap.mmap(-1, stored.size)
        with self._lock:
            self._opened.seek(stored.begin)
            stored.fill(self._opened, memoryview(pages))
        return pages

    def _present_state(self) -> tuple[int, int]:
        state = os.fstat(self._opened.fileno())
        return state.st_size, state.st_mtime_ns


class StoredField:
    """A tensor of an open file; while somebody holds its memory, it is not read again."""

    def __init__(self, file: OpenFile, stored: StoredTensor) -> None:
        self._file, self._stored = file, stored
        self._pages: weakref.ref[mmap.mmap] | None = None

    def __call__(self) -> Tensor:
        """Return the tensor."""
        stored = self._stored
        if not stored.size:
            return torch.empty(stored.shape, dtype=stored.dtype)
        pages = None if self._pages is None else self._pages()
        if pages is None:
            pages = self._file.read(stored)
            self._pages = weakref.ref(pages)
        return torch.frombuffer(pages, dtype=torch.uint8).view(stored.dtype).view(stored.shape)


FORMAT = "calipers.measurements"
VERSION = 2
"""Files of version 1 have no halves, and are as these in everything else."""
_READ = (1, 2)
HEADER = "calipers"
CHECKSUM = "sha256"

_DTYPES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_ALIGNMENT = 8
_KEPT_IN_MEMORY = 1 << 10
"""Bytes of the largest field that is not left in its file: counts of tokens, extrema of tensors."""
Shape = list[Annotated[int, Field(ge=0)]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StatisticHeader(_Strict):
    """A statistic: what it measures, and the shapes of its fields."""

    configuration: dict[str, Any]
    fields: dict[str, Shape]


class TensorHeader(_Strict):
    """A tensor: where it is read, and what is known of it."""

    readers: Annotated[list[str], Field(min_length=1)]
    statistics: dict[str, StatisticHeader]


class ModelHeader(_Strict):
    """The model that was measured."""

    model_class: Annotated[str, Field(alias="class")]
    fingerprint: str


class Header(_Strict):
    """What the file says about itself."""

    format: Literal["calipers.measurements"]
    version: Literal[1, 2]
    calipers: str
    complete: bool
    run: dict[str, Any]
    model: ModelHeader
    samples: list[Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]]
    tokens: Annotated[int, Field(ge=0)]
    tensors: dict[str, TensorHeader]


# Writing


class _Outgoing(NamedTuple):
    """A tensor of a file that is written; it is made again each time, so that one is in memory."""

    dtype: torch.dtype
    shape: list[int]
    size: int
    make: Load


def encoded(info: MeasurementsInfo, tensors: Tensors) -> Iterator[bytes | memoryview]:
    """Give the bytes of a file, part by part."""
    text, stored = _described(info, tensors)
    metadata = {HEADER: text, CHECKSUM: _checksum_of(text, stored)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    # The widest numbers come first, so that each tensor lies at a multiple of their size.
    order = sorted(stored, key=lambda name: (-stored[name].dtype.itemsize, name))
    start = 0
    for name in order:
        outgoing = stored[name]
        entries[name] = {
            "dtype": _DTYPES[outgoing.dtype],
            "shape": outgoing.shape,
            "data_offsets": [start, start + outgoing.size],
        }
        start += outgoing.size
    head = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    head = head.ljust(-(-len(head) // _ALIGNMENT) * _ALIGNMENT)
    yield len(head).to_bytes(8, "little") + head
    for name in order:
        yield _bytes(stored[name].make())


def digest_of_file(info: MeasurementsInfo, tensors: Tensors) -> str:
    """Return the checksum that a file would have."""
    return _checksum_of(*_described(info, tensors))


def _checksum_of(text: str, stored: Mapping[str, _Outgoing]) -> str:
    return checksum(text, ((name, stored[name].make()) for name in sorted(stored)))


def _described(info: MeasurementsInfo, tensors: Tensors) -> tuple[str, dict[str, _Outgoing]]:
    """Return the header of a file, and its tensors."""
    described: dict[str, Any] = {}
    stored: dict[str, _Outgoing] = {}
    for readers, statistics in readers_of(tensors):
        tensor = name_of(readers[0])
        described[tensor] = {"readers": list(map(name_of, readers)), "statistics": {}}
        for key, statistic in statistics.items():
            whole, shapes = whole_beside(key, statistics), {}
            for name, value in statistic.fields().items():
                shapes[name] = list(value.shape)
                make = partial(stored_field, statistic, name, whole)
                packed = make()
                stored[f"{tensor}/{key}.{name}"] = _Outgoing(
                    packed.dtype, list(packed.shape), packed.nbytes, make
                )
            described[tensor]["statistics"][key] = {
                "configuration": statistic.configuration(),
                "fields": shapes,
            }
    header = {
        "format": FORMAT,
        "version": VERSION,
        "calipers": info.calipers,
        "complete": info.is_complete,
        "run": dict(info.run),
        "model": {"class": info.model, "fingerprint": info.fingerprint},
        "samples": list(info.samples),
        "tokens": info.tokens,
        "tensors": described,
    }
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False), stored


def stored_field(statistic: Statistic, name: str, whole: Statistic | None = None) -> Tensor:
    """Return a field of a statistic as it is stored: tables of counts are sparse.

    :param whole: where it is of a fold, the same of all data: its counts are at the places of those
    """
    value: Tensor = getattr(statistic, name).detach()
    if name not in TABLES:
        return value.cpu().contiguous()
    table = None if whole is None else whole.field(name)
    if table is None:
        packed = statistic.packed(name, value).cpu()
    else:
        packed = value.flatten()[table.flatten().nonzero().squeeze(1)].cpu()
    if not packed.numel() or int(packed.max()) < 2**31:
        packed = packed.to(torch.int32)
    return packed.contiguous()


def checksum(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of the header and of all tensors, which come in the order of their names.

    They are looked at one after another, and may be made as they are asked for.
    """
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors:
        digest.update(f"{name} {_DTYPES[tensor.dtype]} {list(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


# Reading


class Decoded(NamedTuple):
    """What a file says; the larger fields of statistics stay in it until they are needed."""

    info: MeasurementsInfo
    tensors: dict[Place, dict[str, Statistic]]
    digest: str


def decoded(file: Path) -> Decoded:
    """Check a file, and refuse it as a whole where anything in it cannot be."""
    try:
        opened = OpenFile(file)
        stored = read_header(file, damaged_measurements)
    except MeasurementsError:
        raise
    except OSError as error:
        raise damaged_measurements(file, f"it cannot be read ({error.strerror})") from error
    fields = {name: StoredField(opened, each) for name, each in stored.items()}
    with library_errors(lambda words: damaged_measurements(file, words)):
        return _FileReader(file, stored, fields).read()


def is_measurements(file: Path) -> bool:
    """Whether a file says that it holds measurements, of whatever version."""
    try:
        read_header(file, damaged_measurements)
        with safe_open(file, "pt") as opened:
            return HEADER in (opened.metadata() or {})
    except (MeasurementsError, OSError):
        return False


class _FileReader:
    """Reads one file."""

    def __init__(
        self, file: Path, stored: Mapping[str, StoredTensor], fields: Mapping[str, Load]
    ) -> None:
        self._file, self._stored, self._fields = file, stored, fields
        self._used: set[str] = set()
        self._freed = FreedMemory()

    def read(self) -> Decoded:
        with safe_open(self._file, "pt") as opened:
            metadata = opened.metadata() or {}
            if HEADER not in metadata or CHECKSUM not in metadata:
                raise self._damaged(f"its header has no '{HEADER}' and no '{CHECKSUM}'")
            raw = parse_json_object(metadata[HEADER].encode(), self._file, damaged_measurements)
            kind, version = raw.get("format"), raw.get("version")
            if kind != FORMAT:
                raise self._damaged(f"its format is {kind!r}, not '{FORMAT}'")
            if version not in _READ or isinstance(version, bool):
                raise MeasurementsError(
                    f"is of version {version!r} of the format, and this Calipers reads versions "
                    f"{' and '.join(map(str, _READ))}",
                    subject=f"The file '{self._file}'",
                    hint="Read it with the Calipers that wrote it, or measure again with this one.",
                )
            for name, each in self._stored.items():
                if each.dtype not in _DTYPES:
                    raise self._damaged(f"'{name}' is of {each.dtype}, which no field is")
        tensors = ((name, self._fields[name]()) for name in sorted(self._fields))
        if checksum(metadata[HEADER], tensors) != metadata[CHECKSUM]:
            raise self._damaged("its checksum is not that of its content: some of it has changed")
        try:
            header = Header.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            place = " → ".join(map(str, first["loc"]))
            raise self._damaged(f"its header, {place}: {first['msg']}") from error
        tensors_of = self._tensors(header)
        unused = sorted(self._fields.keys() - self._used)
        if unused:
            raise self._damaged(f"its header does not speak of '{unused[0]}'")
        if header.complete != (not header.run):
            raise self._damaged("it says that it is complete, and how to go on")
        info = MeasurementsInfo(
            header.model.model_class,
            header.model.fingerprint,
            tuple(header.samples),
            header.tokens,
            header.calipers,
            header.run,
        )
        return Decoded(info, tensors_of, metadata[CHECKSUM])

    def _damaged(self, problem: str) -> MeasurementsError:
        return damaged_measurements(self._file, problem)

    def _tensors(self, header: Header) -> dict[Place, dict[str, Statistic]]:
        tensors: dict[Place, dict[str, Statistic]] = {}
        for name, entry in header.tensors.items():
            statistics: dict[str, Statistic] = {}
            # A fold is read after its whole, whose places it has.
            for key in sorted(entry.statistics, key=lambda key: bool(fold_of(key))):
                each = entry.statistics[key]
                whole = whole_beside(key, statistics)
                statistics[key] = self._statistic(f"{name}/{key}", each, whole)
            problem = problem_with_folds(statistics)
            if problem:
                raise self._damaged(f"{name}: {problem}")
            statistics |= missing_halves(statistics)
            if name not in entry.readers:
                raise self._damaged(f"'{name}' is not among its own readers")
            for reader in entry.readers:
                module, _, base_name = reader.rpartition(".")
                if not module or base_name not in STRATEGIES:
                    raise self._damaged(f"'{reader}' is no tensor of a module")
                if (module, base_name) in tensors:
                    raise self._damaged(f"it has '{reader}' twice")
                tensors[module, base_name] = dict(statistics)
        return tensors

    def _statistic(self, where: str, header: StatisticHeader, whole: Statistic | None) -> Statistic:
        with library_errors(lambda words: self._damaged(f"{where}: {words}")):
            statistic = statistic_of(header.configuration)
        statistic.owner = where
        loads: dict[str, Load] = {}
        for name, shape in header.fields.items():
            stored = f"{where}.{name}"
            if name not in statistic.declared() or stored not in self._fields:
                raise self._damaged(f"it has no '{stored}', or should not have it")
            self._used.add(stored)
            if name in TABLES and whole is not None:
                loads[name] = partial(self._counts_of_fold, whole, name, shape, stored)
            else:
                loads[name] = partial(self._field, statistic, name, tuple(shape), stored)
        fields = {name: load() for name, load in loads.items()}
        problem = problem_with(statistic, fields)
        if problem:
            raise self._damaged(f"{where}: {problem}")
        statistic.load_fields({n: v for n, v in fields.items() if v.nbytes <= _KEPT_IN_MEMORY})
        for name in fields.keys() - statistic.fields():
            statistic.defer(name, loads[name])
        self._freed.count(sum(value.nbytes for value in fields.values()))
        return statistic

    def _counts_of_fold(self, whole: Statistic, name: str, shape: Shape, stored: str) -> Tensor:
        """Lay out the counts of a fold, which are at the places of those of all data."""
        saved, table = self._fields[stored](), whole.field(name)
        table = torch.zeros(0, dtype=torch.int64) if table is None else table
        places = table.flatten().nonzero().squeeze(1)
        if shape != list(table.shape):
            raise self._damaged(f"{stored}: its table is of shape {shape}, that of all is not")
        if saved.dtype not in (torch.int32, torch.int64) or saved.shape != places.shape:
            raise self._damaged(f"{stored}: it must be one count for each of {len(places)} places")
        if bool((saved < 0).any()):
            raise self._damaged(f"{stored}: its counts must not be below zero")
        return torch.zeros_like(table).flatten().index_copy_(0, places, saved.long()).view_as(table)

    def _field(
        self, statistic: Statistic, name: str, shape: tuple[int, ...], stored: str
    ) -> Tensor:
        saved = self._fields[stored]()
        if name not in TABLES:
            if tuple(saved.shape) != shape:
                raise self._damaged(f"{stored}: its shape is {tuple(saved.shape)}, not {shape}")
        elif not shape or shape[-1] != BINS or saved.ndim != 2:
            problem = f"it must be of shape (2, n), for a table of shape (…, {BINS})"
            raise self._damaged(f"{stored}: {problem}")
        elif not 1 <= (pieces := math.prod(shape[:-1])) <= saved.shape[-1]:
            raise self._damaged(f"{stored}: {pieces} tables without a value in each")
        elif saved.dtype == torch.int32:
            saved = saved.to(torch.int64)
        try:
            return statistic.unpacked(name, saved, shape)
        except MergeError as error:
            raise self._damaged(f"{stored}: {error.context.what}") from error


def size_of(statistics: Statistics) -> dict[str, int]:
    """Return how many bytes each statistic of a tensor takes in a file."""
    found = {}
    for key, each in statistics.items():
        whole = whole_beside(key, statistics)
        found[key] = sum(stored_field(each, name, whole).nbytes for name in each.fields())
    return found


def problem_with(statistic: Statistic, fields: Mapping[str, Tensor]) -> str | None:
    """Say why a statistic cannot have such fields, if it cannot; none are those of no data."""
    if not fields:
        return None
    required = [name for name in statistic.declared() if name not in TABLES]
    missing = [name for name in required if name not in fields]
    if missing:
        return f"it lacks {', '.join(missing)}"
    for name, value in fields.items():
        if name in TABLES:
            continue  # checked when it was unpacked
        form = statistic.form_of(name)
        if not form.fits(value):
            return f"{name} must be {form.value}"
    return statistic.problem_with(fields)
