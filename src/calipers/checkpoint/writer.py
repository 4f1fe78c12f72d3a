"""Write a frozen model as a compressed-tensors checkpoint, whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from calipers.checkpoint.auxiliary_files import write_auxiliary_files, write_json, write_notes
from calipers.checkpoint.compatibility import loading_problems
from calipers.checkpoint.compression import (
    check_frozen,
    checkpoint_tensors,
    estimated_size,
    tensor_names,
)
from calipers.checkpoint.config import checkpoint_config
from calipers.checkpoint.names import StoredNames
from calipers.checkpoint.output import free_space, resumable_folder
from calipers.checkpoint.shards import ShardWriter, header_room, parse_size
from calipers.checkpoint.source import check_apart
from calipers.errors import CalipersWarning, CheckpointError
from calipers.runtime.progress import Progress

_MEGABYTE = 1e6


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
    written = TensorStream(lambda _: _counted(model, names, shown), lambda: notes or {})
    return write_stream(
        model,
        names,
        written,
        directory,
        recipe=recipe,
        tokenizer=tokenizer,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
    )


def _counted(
    model: PreTrainedModel, names: StoredNames, progress: Progress
) -> Generator[tuple[str, Tensor], None, None]:
    """Give the tensors of a checkpoint, and show how many bytes they have so far."""
    total = estimated_size(model, names) / _MEGABYTE
    with progress.counting("writing the checkpoint", total, "MB") as add:
        for name, tensor in checkpoint_tensors(model, names):
            yield name, tensor
            add(tensor.nbytes / _MEGABYTE)


@dataclass(frozen=True)
class TensorStream:
    """The tensors of a checkpoint as they are made.

    :param tensors: gives them, under their names on disk; it is told what ``state`` returned when
        an earlier run, which was killed, had finished its last file
    :param notes: returns what calipers.json says besides, when all tensors are made
    :param arguments: what a run must have in common with one that was killed, to go on with it;
        None: it begins anew
    :param state: returns what must be known to go on behind a tensor, as plain data
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
    _check_space(path, estimated_size(model, names))
    config = checkpoint_config(model)
    for problem in loading_problems(model):
        warnings.warn(str(problem), CalipersWarning, stacklevel=3)
    with resumable_folder(path, overwrite, stream.arguments) as journal:
        room = header_room([*names.renamed.values(), *names.converted])
        noted = None if stream.arguments is None else journal
        writer = ShardWriter(journal.folder, shard_size, room, noted, stream.state)
        with closing(stream.tensors(journal.state)) as tensors:
            writer.write(tensors)
        files = write_auxiliary_files(model, journal.folder, recipe=recipe, tokenizer=tokenizer)
        write_notes(journal.folder, files, stream.notes())
        write_json(journal.folder / "config.json", config)
    return path


def _check_space(path: Path, needed: int) -> None:
    free = free_space(path)
    if needed > free:
        raise CheckpointError(
            f"The checkpoint needs about {_gigabytes(needed)}, but the disk of '{path}' has "
            f"{_gigabytes(free)} free. Nothing was written",
            hint="Free some space, or choose a folder on another disk.",
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"
