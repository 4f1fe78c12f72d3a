"""Write a frozen model as a compressed-tensors checkpoint, whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from calipers.checkpoint.auxiliary_files import write_auxiliary_files, write_json
from calipers.checkpoint.compatibility import loading_problems
from calipers.checkpoint.compression import (
    check_frozen,
    checkpoint_tensors,
    estimated_size,
    tensor_names,
)
from calipers.checkpoint.config import checkpoint_config
from calipers.checkpoint.output import check_output, free_space, output_folder
from calipers.checkpoint.shards import ShardWriter, header_room, parse_size
from calipers.checkpoint.source import check_apart
from calipers.errors import CalipersWarning, CheckpointError


def write_checkpoint(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    recipe: str,
    tokenizer: Any = None,
    notes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write a frozen model to a folder that transformers and vLLM load, and return its path.

    The model is not changed. A run that fails leaves no folder, or the one that was there.

    :param recipe: the text of recipe.yaml
    :param tokenizer: what is saved beside the model; None: the files of the model's own folder
    :param notes: what calipers.json says besides the version of Calipers
    :param overwrite: whether a checkpoint that is there already may be replaced
    :param max_shard_size: the largest size of a file of tensors, in bytes or as ``"5GB"``
    """
    check_apart(directory, model)
    path = check_output(directory, overwrite)
    shard_size = parse_size(max_shard_size)
    check_frozen(model)
    names = tensor_names(model)
    _check_space(path, estimated_size(model, names))
    config = checkpoint_config(model)
    for problem in loading_problems(model):
        warnings.warn(str(problem), CalipersWarning, stacklevel=2)
    with output_folder(path, overwrite) as folder:
        write_auxiliary_files(model, folder, recipe=recipe, tokenizer=tokenizer, notes=notes)
        write_json(folder / "config.json", config)
        room = header_room([*names.renamed.values(), *names.converted])
        ShardWriter(folder, shard_size, room).write(checkpoint_tensors(model, names))
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
