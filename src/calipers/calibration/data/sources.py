"""Where records come from: files, lists, tensors, datasets, streams, and ready-made batches."""

from __future__ import annotations

import codecs
import io
import json
import os
import random
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils.data import Dataset as TorchDataset

from calipers.calibration.data.columns import COLUMNS, columns_of
from calipers.calibration.named_datasets import (
    SHUFFLE_BUFFER,
    DatasetName,
    NamedDataset,
    import_extra,
    load_named,
)
from calipers.errors import DataError, empty_data, library_errors, several_splits
from calipers.files.reading import irregular_kind, read_whole

LARGEST_TEXT = 64 * 2**20
"""How many bytes of a text or a stream are read; calibration rarely uses a tenth of them."""

LARGEST_LINE = LARGEST_TEXT
"""The longest line with a record, in bytes; each is read whole."""

LARGEST_LIST = 2**30
"""The largest JSON file that is one list, in bytes; it is read whole."""

_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*(\{\s*"|\[\s*([\[{"]|\d+\s*,))')
"""How records in JSON begin; few texts begin like that."""


@dataclass(frozen=True)
class Records:
    """Records, each with the place where it stands.

    :param items: the records: a sequence, or an iterator, which can be gone through once
    :param first: the one that shows which columns there are
    :param label: what a record is called in messages, before its number
    :param name: what all of them are called there
    :param numbers: the number of each record, where it is not its position
    :param one_document: whether the only record is one long text, of which samples are pieces
    :param notes: what the user should know about what was read
    """

    items: Any
    first: Any
    label: str
    name: str
    numbers: Sequence[int] | None = None
    one_document: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def of_sequence(cls, items: Any, label: str, name: str, **details: Any) -> Records:
        """Return the records of a sequence, of which there must be one."""
        if not len(items):
            raise empty_data(name)
        return cls(items, items[0], label, name, **details)

    def place(self, index: int) -> str:
        """Return where a record stands, in words."""
        return f"{self.label} {index if self.numbers is None else self.numbers[index]}"

    def numbered(self, seed: int | None) -> Iterator[tuple[str, Any]]:
        """Go through the records with their places; those of an iterator are not shuffled."""
        if isinstance(self.items, Iterator):
            indexed: Iterable[tuple[int, Any]] = enumerate(self.items)
        else:
            order = shuffled(len(self.items), seed)
            indexed = ((index, self.items[index]) for index in order)
        return ((self.place(index), item) for index, item in indexed)


def open_file(path: Path, text_column: str | None) -> Records:
    """Return the records of a file, by the ending of its name."""
    # os.path.exists says no to names that are too long, as a text in place of a path is.
    shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}…"
    if not os.path.exists(path):
        raise DataError(
            "does not exist",
            subject=f"The data file '{shown}'",
            hint="A text itself is given in a list: [text]. A data set of the hub is named "
            "ORG/NAME[@CONFIG][:SPLIT].",
        )
    kind = irregular_kind(path)
    if kind is not None:
        raise DataError(
            f"is {kind}, and only regular files are opened",
            subject=f"The data file '{shown}'",
            hint="What another program writes can come through standard input, whose name as data "
            "is '-', or be saved to a file first.",
        )
    name = f"The data file '{path}'"
    if path.stat().st_size == 0:
        raise empty_data(name)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return parquet_file(path, name, text_column)
    if suffix in (".jsonl", ".ndjson"):
        return _lines(f"'{path}'", name, lambda: path.open("rb"))
    if suffix == ".json":
        return json_file(path, name)
    with path.open("rb") as file:
        data = file.read(LARGEST_TEXT)
    notes: tuple[str, ...] = ()
    if (size := path.stat().st_size) > LARGEST_TEXT:
        notes = (
            f"Only the first {LARGEST_TEXT >> 20} MiB of '{path}' ({size >> 20} MiB) are read; "
            "of a .jsonl file, samples are taken from everywhere.",
        )
    text = _decoded(data, name, is_whole=not notes)
    return Records([text], text, f"'{path}', document", name, one_document=True, notes=notes)


def stream(source: io.BufferedIOBase) -> Records:
    """Return what a stream gives: JSON, if it begins as JSON does, or else a text."""
    called = getattr(source, "name", None)
    name = "Standard input" if called == "<stdin>" else f"The stream {called!r}"
    data = source.read(LARGEST_TEXT)
    if not data.strip():
        raise empty_data(name)
    is_whole = len(data) < LARGEST_TEXT or not source.read(1)
    notes = () if is_whole else (f"{name}: only the first {LARGEST_TEXT >> 20} MiB are read.",)
    if not _JSON.match(data):
        text = _decoded(data, name, is_whole=is_whole)
        return Records([text], text, f"{name}, document", name, one_document=True, notes=notes)
    if is_whole:
        return _json(data, name, name, lambda: io.BytesIO(data))
    complete = data[: data.rfind(b"\n") + 1]
    return replace(_lines(name, name, lambda: io.BytesIO(complete)), notes=notes)


class JsonLines(Sequence[Any]):
    """Records of which each stands on a line as a JSON value, and is read when asked for."""

    def __init__(self, name: str, opened: Callable[[], IO[bytes]]) -> None:
        self._name, self._opened = name, opened
        self.numbers = array("Q")
        self._offsets = array("Q")
        offset = number = 0
        with opened() as file:
            while line := file.readline(LARGEST_LINE + 1):
                number += 1
                if len(line) > LARGEST_LINE:
                    raise DataError(
                        f"has more than {LARGEST_LINE >> 20} MiB",
                        subject=f"{name}, line {number}",
                        hint="Does the file have one record per line? Cut long texts, or give them "
                        "as .txt.",
                    )
                if line.strip():
                    self.numbers.append(number)
                    self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        """Read one record."""
        offset = self._offsets[index]
        with self._opened() as file:
            file.seek(offset)
            line = file.readline(LARGEST_LINE)
        where = f"{self._name}, line {self.numbers[index]}"
        text = _decoded(line, where, offset)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _invalid_json(where, error) from None


def json_file(path: Path, name: str) -> Records:
    """Return a JSON file: a list of records, a single one, or in truth one per line."""
    try:
        content = read_whole(path, LARGEST_LIST)
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}",
            subject=name,
            hint="Write it with one record per line, as .jsonl, of which those that are used are "
            "read.",
        ) from None
    return _json(content, f"'{path}'", name, lambda: path.open("rb"))


def _json(data: bytes, label: str, name: str, opened: Callable[[], IO[bytes]]) -> Records:
    text = _decoded(data, name)
    try:
        value, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = name if line is None else f"{label}, line {line}"
        raise _invalid_json(where, error) from None
    if text[end:].strip():  # another value follows
        return _lines(label, name, opened)
    items = value if isinstance(value, list) else [value]
    return Records.of_sequence(items, f"{label}, record", name)


def _lines(label: str, name: str, opened: Callable[[], IO[bytes]]) -> Records:
    lines = JsonLines(label, opened)
    return Records.of_sequence(lines, f"{label}, line", name, numbers=lines.numbers)


def parquet_file(path: Path, name: str, text_column: str | None) -> Records:
    """Return the rows of a Parquet file; only the columns that are used are read."""
    parquet = import_extra("pyarrow.parquet", "a Parquet file")
    label = f"'{path}', row"

    def error_of(words: str) -> DataError:
        return DataError(
            f"is not a Parquet file: {words}",
            subject=name,
            hint="Write it again, or correct its name.",
        )

    with library_errors(error_of), parquet.ParquetFile(path) as file:
        first = next(file.iter_batches(batch_size=1), None)
        if not first:
            raise empty_data(name)
        record = first.to_pylist()[0]
        columns = columns_of(record, text_column, f"{label} 0")
        masks = [column for column in COLUMNS if column in record]
        table = file.read(columns=[*columns, *masks])
        table.validate(full=True)  # or texts that are none end the process
    return Records.of_sequence(_TableRows(table), label, name)


class _TableRows(Sequence[Any]):
    """The rows of an Arrow table, as dicts."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


def _decoded(data: bytes, where: str, offset: int = 0, *, is_whole: bool = True) -> str:
    """Return bytes as text.

    :param offset: where they begin in their file
    :param is_whole: whether they end with a character; if not, what is cut off there is left out
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=is_whole)
        wrong = data.find(b"\0")
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong >= 0:
        raise DataError(
            f"is not UTF-8 text: byte 0x{data[wrong]:02x} at offset {offset + wrong} of the file",
            subject=where,
            hint="Save it as UTF-8, or give another kind of data: .jsonl, .json, .parquet.",
        )
    return text.removeprefix("\ufeff") if offset == 0 else text


def _invalid_json(subject: str, error: Exception) -> DataError:
    problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    if isinstance(error, json.JSONDecodeError):  # some of its messages end with "at"
        problem = f"{error.msg.removesuffix(' at')} at column {error.colno}"
    hint = "Correct or remove it."
    return DataError(f"is not valid JSON: {problem}", subject=subject, hint=hint)


@dataclass(frozen=True)
class ReadyBatches:
    """Batches that the user made."""

    batches: Iterable[Any]


def shuffled(count: int, seed: int | None) -> Sequence[int]:
    """Return the numbers below ``count``: shuffled by a seed, or in order where it is None."""
    return range(count) if seed is None else random.Random(seed).sample(range(count), count)


def open_source(
    dataset: Any, *, seed: int | None, text_column: str | None
) -> Records | ReadyBatches:
    """Recognise what kind of dataset was given and open it.

    :param seed: of the shuffling of a stream of `datasets`; None for its own order
    """
    kind = type(dataset).__name__
    if isinstance(dataset, (str, os.PathLike)):
        return _from_path(dataset, seed, text_column)
    if isinstance(dataset, io.BufferedIOBase):
        return stream(dataset)
    if isinstance(dataset, NamedDataset):
        label = f"'{dataset.name}', row"
        return _from_stream(dataset.records(seed), label, f"'{dataset.name}'", dataset.notes)
    if isinstance(dataset, Mapping):
        if is_batch(dataset):
            return ReadyBatches([dataset])
        if _is_of_datasets(dataset):
            raise several_splits(map(str, dataset))
        keys = ", ".join(map(str, list(dataset)[:5])) or "none"
        raise _no_dataset(f"of type {kind} (its keys: {keys})")
    if _is_of_datasets(dataset):
        if isinstance(dataset, Sized):
            return Records.of_sequence(dataset, "row", "The dataset")
        if seed is not None:
            dataset = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        return _from_stream(dataset, "row")
    if isinstance(dataset, torch.Tensor) or kind == "ndarray":
        if dataset.ndim != 2:
            advice = "One row of token ids is given as ids[None]." if dataset.ndim == 1 else ""
            raise _no_dataset(f"a {kind} of shape {tuple(dataset.shape)}", advice)
        return Records.of_sequence(dataset, "row", "The tensor of token ids")
    if isinstance(dataset, Set):
        raise _no_dataset(f"of type {kind}", "A set has no order of its own: give a list.")
    if hasattr(dataset, "to_dict"):
        advice = "Of a data frame, give its records: frame.to_dict('records')."
        raise _no_dataset(f"of type {kind}", advice)
    if isinstance(dataset, (bytes, bytearray)):
        raise _no_dataset(f"of type {kind}")
    has_items = isinstance(dataset, TorchDataset) and hasattr(dataset, "__getitem__")
    is_list = isinstance(dataset, Sequence) or (has_items and isinstance(dataset, Sized))
    if is_list:
        if len(dataset) and is_batch(dataset[0]):
            return ReadyBatches(dataset)
        return Records.of_sequence(dataset, "item", "The dataset")
    if isinstance(dataset, Iterable):
        return _from_stream(dataset)
    raise _no_dataset(f"of type {kind}")


def _from_path(
    dataset: str | os.PathLike[str], seed: int | None, text_column: str | None
) -> Records | ReadyBatches:
    """Open a file, a folder, or a data set by its name; what is on disk wins over a name."""
    path, name = Path(dataset), None
    if os.path.isdir(path):  # no, where a name is too long
        name = DatasetName(str(path))
    elif isinstance(dataset, str) and not os.path.exists(path):
        name = DatasetName.parse(dataset)
    if name is not None:
        return open_source(load_named(name), seed=seed, text_column=text_column)
    return open_file(path, text_column)


def is_batch(item: Any) -> bool:
    """Return whether an item of a dataset is a batch, not a single record."""
    ids = item.get("input_ids") if isinstance(item, Mapping) else item
    return getattr(ids, "ndim", 0) > 1


def _from_stream(
    dataset: Iterable[Any],
    label: str = "item",
    name: str = "The dataset",
    notes: tuple[str, ...] = (),
) -> Records | ReadyBatches:
    iterator = iter(dataset)
    try:
        first = next(iterator)
    except StopIteration:
        raise empty_data(name) from None
    items: Iterator[Any] = chain([first], iterator)
    if is_batch(first):
        return ReadyBatches(items)
    return Records(items, first, label, name, notes=notes)


def _is_of_datasets(dataset: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(dataset).__mro__)


def _no_dataset(what: str, advice: str = "") -> DataError:
    return DataError(
        f"A dataset cannot be {what}",
        allowed="the path of a text, .jsonl, .json or .parquet file or of a folder of "
        "save_to_disk; the name of a data set; a Dataset of datasets; a list of texts, chats, "
        "records or lists of token ids; a 2-D tensor of token ids; a file that is "
        "open to read bytes; a DataLoader or another iterable of batches with input_ids",
        hint=advice,
    )
