"""What the folder of a quantized checkpoint says of itself: schemes, scales, sizes and notes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from torch import Tensor

from calipers.checkpoint.folder_contents import NOTES
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.lint.contents import Contents
from calipers.checkpoint.lint.modules import read_model, read_modules
from calipers.checkpoint.lint.settings import read_settings
from calipers.checkpoint.location import check_location
from calipers.errors import CalipersError, cannot_load
from calipers.files.json_files import read_json_object
from calipers.files.safetensors_header import StoredTensor
from calipers.numerics.formats import Format
from calipers.numerics.layout import granularity_name

_MARKS = ("weight_packed", "weight_scale", "input_scale", "output_scale")
_MX_BIAS = 127
_STATES = ("k_scale", "v_scale", "q_scale")


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint as its files have it; tensors are read when they are asked for.

    :param name: of the folder
    :param stored: its tensors
    :param schemes: quantized module → how it is quantized
    :param form: the format of compression that the config names for all
    :param notes: what ``calipers.json`` says; empty where there is none
    :param missing: what is not known, and why
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]
    schemes: Mapping[str, QuantizationScheme]
    form: str
    kv_cache: QuantizationArgs | None
    notes: Mapping[str, Any]
    missing: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CheckpointFolder:
        """Read a folder; refuse one that holds no quantized checkpoint."""
        folder = Path(path)
        _check_folder(folder)
        config = read_json_object(folder / "config.json")
        stored = stored_tensors(folder)
        settings = read_settings(folder)
        notes, missing = _notes(folder)
        return cls(
            Path(os.path.realpath(folder)).name,
            folder,
            config,
            stored,
            _schemes(Contents(folder, stored), settings),
            str(settings.format),
            settings.kv_cache_scheme,
            notes,
            missing,
        )

    @cached_property
    def parts(self) -> dict[str, dict[str, StoredTensor]]:
        """Module → its own tensors, by their local names."""
        found: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in self.stored.items():
            module, _, local = name.rpartition(".")
            found.setdefault(module, {})[local] = tensor
        return found

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size for tensor in self.stored.values())

    def size_of(self, module: str) -> int | None:
        """Return the bytes of the tensors of a module; None if it has none here."""
        parts = self.parts.get(module)
        return None if parts is None else sum(tensor.size for tensor in parts.values())

    def tensor(self, module: str, local: str) -> Tensor | None:
        """Read a tensor of a module."""
        found = self.parts.get(module, {}).get(local)
        return None if found is None else found.read()

    def weights_in(self, module: str) -> int | None:
        """Return how many weights a module has; None if that cannot be told."""
        parts, scheme = self.parts.get(module, {}), self.schemes.get(module)
        if "weight" in parts:
            return _count(parts["weight"].shape)
        if "weight_shape" in parts:
            return _count(parts["weight_shape"].read().tolist())
        packed = parts.get("weight_packed")
        if packed is None or scheme is None or scheme.weights is None:
            return None
        return packed.size * 8 // int(scheme.weights.num_bits)

    def weight_scales(self, module: str) -> Tensor | None:
        """Return what codes are multiplied by, in float32; None where it is not stored."""
        scale = self.tensor(module, "weight_scale")
        if scale is None:
            return None
        if scale.dtype == torch.uint8:  # MX: the exponent
            return (scale.float() - _MX_BIAS).exp2()
        whole = self.tensor(module, "weight_global_scale")
        return scale.float() if whole is None else scale.float() / whole.float()

    def is_static(self, module: str) -> bool:
        """Whether the input of a module has parameters that were found from data."""
        scheme = self.schemes.get(module)
        args = None if scheme is None else scheme.input_activations
        return args is not None and args.dynamic is False


def scheme_label(scheme: QuantizationScheme | None) -> str:
    """Return how a module is quantized, in a few words.

    >>> int8 = QuantizationArgs(num_bits=8)
    >>> scheme_label(QuantizationScheme(targets=["Linear"], weights=int8, input_activations=int8))
    'int8 by tensor, input int8 by tensor'
    """
    if scheme is None:
        return "not quantized"
    sides = {"": scheme.weights, "input ": scheme.input_activations}
    sides["output "] = scheme.output_activations
    return ", ".join(f"{side}{args_label(args)}" for side, args in sides.items() if args)


def args_label(args: QuantizationArgs) -> str:
    """Return a format and its granularity in a few words."""
    try:
        name = Format.of(args).name
    except CalipersError:  # a format of somebody else
        name = f"{args.type}{args.num_bits}"
    dynamic = " while it runs" if args.dynamic else ""
    return f"{name} by {granularity_name(args)}{dynamic}"


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise cannot_load(str(folder), "there is no such folder", "checkpoint")
    check_location(str(folder))


def _notes(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    if (folder / NOTES).is_file():
        return read_json_object(folder / NOTES), ()
    lost = f"{NOTES} is not there: Calipers did not write this checkpoint, or the file was lost"
    return {}, (f"{lost}. Errors are worked out anew where the source is at hand",)


def _schemes(contents: Contents, settings: QuantizationConfig) -> dict[str, QuantizationScheme]:
    """Return how each module is quantized that has quantized tensors."""
    model, _ = read_model(contents)
    return {
        module.name: module.scheme
        for module in read_modules(contents, settings, model)
        if module.scheme is not None and any(mark in module.tensors for mark in _MARKS)
    }


def _count(shape: Iterable[int]) -> int:
    total = 1
    for size in shape:
        total *= int(size)
    return total


def attention_modules(folder: CheckpointFolder) -> Iterator[str]:
    """Give the modules whose keys and values have scales."""
    return (name for name, parts in folder.parts.items() if any(s in parts for s in _STATES))
