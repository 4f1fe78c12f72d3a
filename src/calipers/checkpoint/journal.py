"""Which files of a checkpoint are finished, so that whoever goes on does not make them again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calipers.errors import CalipersError
from calipers.files.json_files import read_json_object
from calipers.files.output_file import sync, sync_folder

NAME = "journal.json"


@dataclass(frozen=True)
class FinishedShard:
    """A file of tensors.

    :param size: bytes of the tensors
    :param length: bytes of the file
    """

    file: str
    tensors: list[str]
    size: int
    length: int


class Journal:
    """A file beside the folder of an unfinished checkpoint; it is written whole each time.

    :param arguments: what two runs must have in common for the second one to go on, as plain data
    """

    def __init__(self, work: Path, folder: Path, arguments: Mapping[str, Any]) -> None:
        self._file, self.folder, self._arguments = work / NAME, folder, dict(arguments)
        self.shards: list[FinishedShard] = []
        self.state: dict[str, Any] = {}

    @property
    def tensors(self) -> set[str]:
        """The names of all tensors in finished files."""
        return {name for shard in self.shards for name in shard.tensors}

    def load(self) -> bool:
        """Read what an earlier run has finished; False if it did not do the same, or left ruins."""
        with suppress(OSError, CalipersError, TypeError, KeyError):
            found = read_json_object(self._file)
            shards = [FinishedShard(**each) for each in found["shards"]]
            if found["arguments"] == self._arguments and all(map(self._is_whole, shards)):
                self.shards, self.state = shards, dict(found["state"])
                return True
        return False

    def add(self, shard: FinishedShard, state: Mapping[str, Any]) -> None:
        """Note that a file is finished.

        :param state: what is to be known again by whoever goes on, as plain data
        """
        sync(self.folder / shard.file)
        self.shards.append(shard)
        content = {
            "arguments": self._arguments,
            "shards": list(map(asdict, self.shards)),
            "state": dict(state),
        }
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(content), encoding="utf-8")
        sync(new)
        os.replace(new, self._file)
        sync_folder(self._file.parent)

    def remove_unfinished(self) -> None:
        """Remove from the folder what is not a finished file."""
        finished = {shard.file for shard in self.shards}
        for path in self.folder.iterdir():
            if path.name not in finished:
                path.unlink()

    def _is_whole(self, shard: FinishedShard) -> bool:
        """Whether a file is as it was when it was finished; it was on disk before it was noted."""
        path = self.folder / shard.file
        return path.parent == self.folder and path.stat().st_size == shard.length


def remove_journal(work: Path) -> None:
    """Let nobody go on with what is in a folder."""
    for name in (NAME, "journal.new"):
        (work / name).unlink(missing_ok=True)


def has_journal(work: Path) -> bool:
    """Whether somebody may go on with what is in a folder."""
    return (work / NAME).is_file()
