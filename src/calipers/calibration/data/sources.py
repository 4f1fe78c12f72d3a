"""Where records come from: files, lists, tensors, datasets, streams, and ready-made batches."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset as TorchDataset

from calipers.calibration.data.files import Rows, open_file, stream
from calipers.calibration.data.named_datasets import SHUFFLE_BUFFER, NamedDataset, load_named
from calipers.calibration.dataset_names import DatasetName
from calipers.errors import DataError, Words, empty_data, several_splits


@dataclass(frozen=True)
class Records:
    """Records, each with the place where it stands, in the order in which they are used.

    :param first: the record that shows which columns there are, with its place
    :param numbered: all records with their places; can be gone through once
    :param name: what they are, in messages
    :param one_document: whether the only record is one long text, of which samples are pieces
    :param notes: what the user should know about what was read
    """

    first: tuple[str, Any]
    numbered: Iterable[tuple[str, Any]]
    name: str
    one_document: bool = False
    notes: tuple[Words, ...] = ()


@dataclass(frozen=True)
class ReadyBatches:
    """Batches that the user made."""

    batches: Iterable[Any]


def shuffled(count: int, seed: int | None) -> Sequence[int]:
    """Return the numbers below ``count``: in order, or as the seed has it.

    >>> sorted(shuffled(5, seed=1)), shuffled(3, seed=None)
    ([0, 1, 2, 3, 4], range(0, 3))
    """
    return range(count) if seed is None else random.Random(seed).sample(range(count), count)


def open_source(
    dataset: Any, *, seed: int | None, text_column: str | None
) -> Records | ReadyBatches:
    """Recognise what kind of dataset was given and open it.

    :param seed: of the shuffling; None for the order of the dataset
    """
    if isinstance(dataset, (str, os.PathLike)):
        path = Path(dataset)
        named = _named(path, dataset)
        if named is not None:
            return open_source(load_named(named), seed=seed, text_column=text_column)
        return _from_rows(open_file(path, text_column), f"The data file '{path}'", seed)
    if isinstance(dataset, io.BufferedIOBase):
        called = getattr(dataset, "name", None)
        name = "Standard input" if called == "<stdin>" else f"The stream {called!r}"
        return _from_rows(stream(dataset, name), name, seed)
    if isinstance(dataset, NamedDataset):
        label = f"'{dataset.name}', row"
        return _from_stream(dataset.records(seed), label, f"'{dataset.name}'", dataset.notes)
    if isinstance(dataset, Mapping):
        return _from_mapping(dataset)
    if _is_of_datasets(dataset):
        return _from_dataset(dataset, seed)
    if isinstance(dataset, torch.Tensor) or type(dataset).__name__ == "ndarray":
        return _from_rows(_rows_of_array(dataset), "The tensor of token ids", seed)
    if isinstance(dataset, (bytes, bytearray, Set)) or hasattr(dataset, "to_dict"):
        raise _no_dataset(f"of type {type(dataset).__name__}", _advice(dataset))
    if _is_list(dataset):
        if len(dataset) and is_batch(dataset[0]):
            return ReadyBatches(dataset)
        return _from_rows(Rows(dataset, "item"), "The dataset", seed)
    if isinstance(dataset, Iterable):
        return _from_stream(dataset)
    raise _no_dataset(f"of type {type(dataset).__name__}")


def is_batch(item: Any) -> bool:
    """Return whether an item of a dataset is a batch, not a single record."""
    ids = item.get("input_ids") if isinstance(item, Mapping) else item
    return getattr(ids, "ndim", 0) > 1


def _from_rows(rows: Rows, name: str, seed: int | None) -> Records:
    if not len(rows.records):
        raise empty_data(name)
    order = shuffled(len(rows.records), seed)
    return Records(
        first=(rows.location(0), rows.records[0]),
        numbered=((rows.location(index), rows.records[index]) for index in order),
        name=name,
        one_document=rows.one_document,
        notes=rows.notes,
    )


def _named(path: Path, given: object) -> DatasetName | None:
    """Return the name of a data set; None for a file, which wins over a name."""
    if os.path.isdir(path):  # no, where a name is too long
        return DatasetName(str(path))
    return DatasetName.parse(given) if isinstance(given, str) and not os.path.exists(path) else None


def _from_stream(
    dataset: Iterable[Any],
    label: str = "item",
    name: str = "The dataset",
    notes: tuple[Words, ...] = (),
) -> Records | ReadyBatches:
    iterator = iter(dataset)
    try:
        first = next(iterator)
    except StopIteration:
        raise empty_data(name) from None
    items: Iterator[Any] = chain([first], iterator)
    if is_batch(first):
        return ReadyBatches(items)
    numbered = ((f"{label} {index}", item) for index, item in enumerate(items))
    return Records((f"{label} 0", first), numbered, name, notes=notes)


def _from_dataset(dataset: Any, seed: int | None) -> Records | ReadyBatches:
    """A Dataset or IterableDataset of the library `datasets`."""
    if isinstance(dataset, Sized):
        return _from_rows(Rows(dataset, "row"), "The dataset", seed)  # type: ignore[arg-type]
    if seed is not None:
        dataset = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    return _from_stream(dataset, "row")


def _from_mapping(dataset: Mapping[str, Any]) -> ReadyBatches:
    if is_batch(dataset):
        return ReadyBatches([dataset])
    if _is_of_datasets(dataset):
        raise several_splits(map(str, dataset))
    keys = ", ".join(map(str, list(dataset)[:5])) or "none"
    raise _no_dataset(f"of type {type(dataset).__name__} (its keys: {keys})")


def _rows_of_array(dataset: Any) -> Rows:
    if dataset.ndim != 2:
        advice = "One row of token ids is given as ids[None]." if dataset.ndim == 1 else ""
        shape = tuple(dataset.shape)
        raise _no_dataset(f"a {type(dataset).__name__} of shape {shape}", advice)
    return Rows(dataset, "row")


def _is_of_datasets(dataset: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(dataset).__mro__)


def _is_list(dataset: Any) -> bool:
    indexed = isinstance(dataset, TorchDataset) and hasattr(dataset, "__getitem__")
    return isinstance(dataset, Sequence) or (indexed and isinstance(dataset, Sized))


def _advice(dataset: Any) -> str:
    if isinstance(dataset, Set):
        return "A set has no order of its own: give a list."
    if hasattr(dataset, "to_dict"):
        return "Of a data frame, give its records: frame.to_dict('records')."
    return ""


def _no_dataset(what: str, advice: str = "") -> DataError:
    return DataError(
        f"A dataset cannot be {what}",
        allowed="the path of a text, .jsonl, .json or .parquet file or of a folder of "
        "save_to_disk; the name of a data set; a Dataset of datasets; a list of texts, chats, "
        "records or lists of token ids; a 2-D tensor of token ids; a file that is "
        "open to read bytes; a DataLoader or another iterable of batches with input_ids",
        hint=advice,
    )
