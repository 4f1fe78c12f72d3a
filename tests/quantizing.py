"""Models on disk, and what two checkpoints have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import VOCABULARY, build, saved

import calipers
from calipers.checkpoint.headers import stored_tensors

IDS = torch.randint(VOCABULARY, (6, 40), generator=torch.Generator().manual_seed(3))
HEADS = ["re:.*lm_head"]


def model_folder(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Write a small model to disk, in bfloat16 unless another dtype is given."""
    return saved(build(family, changes.pop("dtype", torch.bfloat16), **changes), folder)


def modifier(scheme: str, **options: Any) -> calipers.QuantizationModifier:
    kind = calipers.GPTQModifier if options.pop("gptq", False) else calipers.QuantizationModifier
    return kind(scheme=scheme, ignore=options.pop("ignore", HEADS), **options)


def bytes_of(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return the dtype and the bytes of every tensor of a checkpoint."""
    found = {}
    for name, tensor in stored_tensors(folder).items():
        values = tensor.read()
        content = bytes(values.view(-1).view(torch.uint8).numpy())
        found[name] = (f"{tensor.dtype} {tensor.shape}", content)
    return found


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Tensors and all files beside them are equal; only calipers.json tells of the way there."""
    ours, theirs = bytes_of(one), bytes_of(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    beside = [
        {file.name: file.read_bytes() for file in folder.iterdir() if _is_compared(file)}
        for folder in (one, other)
    ]
    assert beside[0] == beside[1]


def _is_compared(file: Path) -> bool:
    return file.suffix not in (".safetensors",) and file.name != "calipers.json"
