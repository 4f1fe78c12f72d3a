"""Write a frozen model as a compressed-tensors checkpoint, whole or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from calipers.checkpoint.companions import write_companions, write_json
from calipers.checkpoint.compatibility import loading_problems
from calipers.checkpoint.compression import check_frozen
from calipers.checkpoint.config import checkpoint_config
from calipers.checkpoint.output import check_output, free_space, output_folder
from calipers.checkpoint.shards import ShardWriter, header_room, parse_size
from calipers.checkpoint.source import check_apart
from calipers.checkpoint.tensors import checkpoint_tensors, estimated_size, tensor_names
from calipers.errors import CalipersWarning, DiskSpaceError


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
    needed, free = estimated_size(model, names), free_space(path)
    if needed > free:
        raise DiskSpaceError(path, needed, free)
    config = checkpoint_config(model)
    for problem in loading_problems(model):
        warnings.warn(str(problem), CalipersWarning, stacklevel=2)
    with output_folder(path, overwrite) as folder:
        write_companions(model, folder, recipe=recipe, tokenizer=tokenizer, notes=notes)
        write_json(folder / "config.json", config)
        room = header_room([*names.renamed.values(), *names.converted])
        ShardWriter(folder, shard_size, room).write(checkpoint_tensors(model, names))
    return path
