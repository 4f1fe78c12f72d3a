"""The names of data sets; nothing heavy is imported to read them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_PARTS = re.compile(r"(?P<path>.+?)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?")
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LONGEST = 96
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
        found = _PARTS.fullmatch(text)
        if found is None or not (os.path.isdir(found["path"]) or _can_be_on_hub(found["path"])):
            return None
        return cls(**found.groupdict())

    @property
    def is_local(self) -> bool:
        """Whether it is a folder; a folder wins over a name on the hub."""
        return os.path.isdir(self.path)

    def __str__(self) -> str:
        config = f"@{self.config}" if self.config else ""
        return f"{self.path}{config}" + (f":{self.split}" if self.split else "")


def _can_be_on_hub(path: str) -> bool:
    ending = os.path.splitext(path)[1].lower()
    return len(path) <= _LONGEST and ending not in _OF_FILES and bool(_ON_HUB.fullmatch(path))
