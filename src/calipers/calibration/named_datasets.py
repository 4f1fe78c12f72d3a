"""Data sets by their names: from the hub, from its cache, or from a folder of data files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from calipers.errors import DataError, several_splits
from calipers.runtime.environment import hub_answers

SHUFFLE_BUFFER = 10_000
"""How many records of a stream are shuffled at a time."""

_DEFAULT_SPLIT = "train"
_LONGEST_REASON = 300
_SAVED = ("dataset_info.json", "dataset_dict.json")
_PARTS = re.compile(r"(?P<path>.+?)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?")
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LONGEST_NAME = 96
_OF_FILES = (
    *(".txt", ".text", ".md", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv"),
    *(".gz", ".zst", ".zip", ".py", ".yaml", ".yml"),
)


@dataclass(frozen=True)
class DatasetName:
    """A data set that the library ``datasets`` loads.

    :param path: a folder, or the name of a data set on the hub
    :param config: which of its configurations, where it has several
    :param split: which of its splits; None where nobody said it
    """

    path: str
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> DatasetName | None:
        """Read ``NAME[@CONFIG][:SPLIT]``; None for what can only be a path or a text.

        >>> DatasetName.parse("Salesforce/wikitext@wikitext-2-raw-v1:test")
        DatasetName(path='Salesforce/wikitext', config='wikitext-2-raw-v1', split='test')
        >>> DatasetName.parse("stories.jsonl"), DatasetName.parse("Once upon a time")
        (None, None)
        """
        parts = _PARTS.fullmatch(text)
        if parts is None:
            return None
        path = parts["path"]
        ending = os.path.splitext(path)[1].lower()
        is_short = len(path) <= _LONGEST_NAME
        on_hub = is_short and ending not in _OF_FILES and bool(_ON_HUB.fullmatch(path))
        return cls(**parts.groupdict()) if on_hub or os.path.isdir(path) else None

    @property
    def is_local(self) -> bool:
        """Whether it is a folder; a folder wins over a name on the hub."""
        return os.path.isdir(self.path)

    def __str__(self) -> str:
        config = f"@{self.config}" if self.config else ""
        return f"{self.path}{config}" + (f":{self.split}" if self.split else "")


def import_extra(module: str, what: str) -> Any:
    """Import what only some kinds of data need."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(
            f"Reading {what} needs the package {package}, which is not installed",
            hint="Install it with pip install 'calipers[data]'.",
        ) from None


@dataclass(frozen=True)
class NamedDataset:
    """A stream of records: only what is used is downloaded.

    :param stream: an IterableDataset of `datasets`
    :param notes: what the user should know about where it comes from
    """

    name: DatasetName
    stream: Any
    notes: tuple[str, ...] = ()

    def records(self, seed: int | None) -> Iterator[Any]:
        """Go through the records; what fails on the way says which data set it was."""
        stream = self.stream
        if seed is not None:
            stream = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        try:
            yield from stream
        except Exception as error:  # files and servers of others: anything can come
            raise _unreadable(self.name, _reason(error)) from error


def load_named(name: DatasetName) -> Any:
    """Load a data set by its name: a stream, or the Dataset of a folder of ``save_to_disk``."""
    datasets = import_extra("datasets", "a folder of data" if name.is_local else "a named data set")
    if name.is_local and any(Path(name.path, each).exists() for each in _SAVED):
        return _saved(datasets, name)
    reached = name.is_local or hub_answers()
    try:
        with _quiet(datasets, offline=not reached):
            stream = datasets.load_dataset(
                name.path, name.config, split=name.split or _DEFAULT_SPLIT, streaming=True
            )
    except Exception as error:  # files and servers of others: anything can come
        if not reached and isinstance(error, ConnectionError):
            raise DataError(
                "is no file or folder here and not in the cache of datasets, and the hub, which "
                "may have a data set of that name, cannot be reached",
                subject=f"'{name}'",
                hint="Correct the path, or try again with a network. A text itself is given in a "
                "list: [text].",
            ) from None
        raise _unreadable(name, _reason(error)) from error
    cached = f"The hub cannot be reached: '{name}' is read as the cache of datasets has it."
    return NamedDataset(name, stream, () if reached else (cached,))


def _saved(datasets: Any, name: DatasetName) -> Any:
    loaded = datasets.load_from_disk(name.path)
    if not isinstance(loaded, Mapping):
        if name.split is not None:
            raise _unreadable(name, f"'{name.path}' has no splits")
        return loaded
    if name.split is None:
        raise several_splits(map(str, loaded), name.path)
    if name.split not in loaded:
        raise _unreadable(name, f"its splits are {', '.join(map(str, loaded))}")
    return loaded[name.split]


@contextmanager
def _quiet(datasets: Any, *, offline: bool) -> Iterator[None]:
    """Keep what the library logs to ourselves and, offline, let it look into its cache alone."""
    logging, config = datasets.logging, datasets.config
    before = logging.get_verbosity(), config.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    config.HF_HUB_OFFLINE = offline or config.HF_HUB_OFFLINE
    try:
        yield
    finally:
        logging.set_verbosity(before[0])
        config.HF_HUB_OFFLINE = before[1]


def _unreadable(name: DatasetName, problem: str) -> DataError:
    return DataError(
        f"cannot be read: {problem}",
        subject=f"The data set '{name}'",
        allowed="NAME[@CONFIG][:SPLIT], where NAME is a data set on the hub or a folder of data "
        "files, and SPLIT is train unless you name another",
    )


def _reason(error: Exception) -> str:
    """Return what a library says, in one line that is not too long."""
    words = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]}…"
