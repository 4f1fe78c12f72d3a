"""Models on disk, and what two checkpoints have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import VOCABULARY, build, saved

import calipers
from calipers import Measurements
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.reader import load_model

IDS = torch.randint(VOCABULARY, (6, 40), generator=torch.Generator().manual_seed(3))
HEADS = ["re:.*lm_head"]
COLLECTED = "hessian,outputs,attention"
HEAD_CACHE = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32}
WITH_OUTPUTS = calipers.QuantizationModifier(
    targets="Linear",
    ignore=HEADS,
    weights={**GROUP, "observer": "imatrix_mse"},
    output_activations={"num_bits": 8, "strategy": "tensor"},
)


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


def measured(model: Path) -> Measurements:
    """Measure all that quantizing may need, and read the file of it."""
    file = model.with_name("seen")
    calipers.measure(model, IDS, collect=COLLECTED, output_file=file, progress=False)
    return Measurements.load(file)


def quantize(model: Path, recipe: Any, out: Path, **options: Any) -> calipers.QuantizeResult:
    return calipers.quantize(model, recipe, output_dir=out, progress=False, **options)


def both(model: Path, recipe: Any, tmp: Path, data: Any = None, **options: Any) -> None:
    """Quantize in memory and from disk to disk, and compare."""
    calipers.oneshot(load_model(model), recipe, data, output_dir=tmp / "memory", progress=False)
    quantize(model, recipe, tmp / "disk", **options)
    assert_same_checkpoint(tmp / "disk", tmp / "memory")
