"""What the folder of a quantized checkpoint says of itself: schemes, scales, sizes and notes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
)
from torch import Tensor

from calipers.checkpoint.folder_contents import NOTES
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.location import check_location
from calipers.errors import CalipersError, cannot_load
from calipers.files.json_files import read_json_object
from calipers.files.safetensors_header import StoredTensor
from calipers.linting.contents import Contents
from calipers.linting.modules import StoredModule, read_model, read_modules
from calipers.linting.settings import read_settings
from calipers.linting.tensor_checks import is_sound
from calipers.numerics.formats import Format
from calipers.numerics.layout import granularity_name

_MARKS = ("weight_packed", "weight_scale", "input_scale", "output_scale")
_MX_BIAS = 127
_STATES = ("k_scale", "v_scale", "q_scale")


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint as its files have it; tensors are read when they are asked for.

    :param name: of the folder
    :param modules: by their names, with their tensors and how the config says they are quantized
    :param form: the format of compression that the config names for all
    :param notes: what ``calipers.json`` says; empty where there is none
    :param missing: what is not known, and why
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    modules: Mapping[str, StoredModule]
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
        contents = Contents(folder, stored_tensors(folder))
        settings = read_settings(folder)
        model, _ = read_model(contents)
        modules = read_modules(contents, settings, model)
        notes, missing = _notes(folder)
        return cls(
            Path(os.path.realpath(folder)).name,
            folder,
            config,
            {module.name: module for module in modules},
            str(settings.format),
            settings.kv_cache_scheme,
            notes,
            missing,
        )

    @cached_property
    def parts(self) -> dict[str, Mapping[str, StoredTensor]]:
        """Module → its own tensors, by their local names."""
        return {name: module.tensors for name, module in self.modules.items() if module.tensors}

    @cached_property
    def schemes(self) -> dict[str, QuantizationScheme]:
        """Quantized module → how it is quantized."""
        return {
            name: module.scheme
            for name, module in self.modules.items()
            if module.scheme is not None and any(mark in module.tensors for mark in _MARKS)
        }

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size for parts in self.parts.values() for tensor in parts.values())

    def size_of(self, module: str) -> int | None:
        """Return the bytes of the tensors of a module; None if it has none here."""
        parts = self.parts.get(module)
        return None if parts is None else sum(tensor.size for tensor in parts.values())

    def tensor(self, module: str, local: str) -> Tensor | None:
        """Read a tensor of a module."""
        found = self.parts.get(module, {}).get(local)
        return None if found is None else found.read()

    def shape_of(self, module: str) -> tuple[int, ...] | None:
        """Return the shape of the weight of a module; None if that cannot be told."""
        found = self.modules.get(module)
        if found is None:
            return None
        weight = found.tensors.get("weight")
        return found.shape or (None if weight is None else weight.shape)

    def is_sound(self, module: str) -> bool:
        """Whether a module has a quantized weight whose tensors fit each other; see lint."""
        found = self.modules.get(module)
        return found is not None and is_sound(found)

    def weight_scales(self, module: str) -> Tensor | None:
        """Return what codes are multiplied by, in float32; None where tensors do not fit."""
        scale = self.tensor(module, "weight_scale") if self.is_sound(module) else None
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


def attention_modules(folder: CheckpointFolder) -> Iterator[str]:
    """Give the modules whose keys and values have scales."""
    return (name for name, parts in folder.parts.items() if any(s in parts for s in _STATES))
