"""Where the tensors of a model are: in its files, each read when it is asked for, or in memory."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calipers.checkpoint.compression import checkpoint_tensors, tensor_names
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.location import check_location
from calipers.checkpoint.state import (
    converted_back,
    offloaded_tensors,
    read_tensor,
    stored_names,
    tied_names,
)
from calipers.checkpoint.unknown_model import skeleton_of
from calipers.errors import ConfigurationError, cannot_load, damaged_file
from calipers.files.reading import read_json_object
from calipers.files.safetensors_header import StoredTensor
from calipers.topology.names import EMBEDDINGS, HEADS

_VALUES = 16
"""How many values of a tensor are looked at, at least."""


class StoredAs(NamedTuple):
    """A tensor on disk, its name there, and the dtype that it has in the model."""

    name: str
    tensor: StoredTensor
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Return it as it is in the model."""
        return self.tensor.map().to(self.dtype)


@dataclass(frozen=True)
class StoredWeights:
    """Those of a model without values, in its files.

    :param whole: name in the model → what is stored for it
    :param in_other_form: what is stored instead of tensors that transformers converts
    """

    whole: Mapping[str, StoredAs]
    in_other_form: tuple[StoredAs, ...] = ()

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        stored: Mapping[str, StoredTensor],
        ties: Mapping[str, str],
        own_names: Collection[str],
    ) -> StoredWeights | None:
        """Find them; None where the files do not hold every tensor as the model has it.

        :param ties: each tied copy in the model, before it is quantized, and what it is tied to
        :param own_names: those of its tensors before it is quantized
        """
        names, tensors = tensor_names(model), offloaded_tensors(model)
        tied = stored_names(model, [*ties, *ties.values()]).renamed
        whole = {}
        for name in filter(own_names.__contains__, names.renamed):
            candidates = (names.renamed[name], tied.get(ties.get(name, "")))
            on_disk = next((key for key in candidates if key in stored), None)
            if on_disk is None:
                return None
            whole[name] = StoredAs(on_disk, stored[on_disk], tensors[name].dtype)
        if not names.converted:
            return cls(whole)
        # What the files hold instead of tensors that transformers converts.
        known = {*names.renamed.values(), *(tied[copy] for copy in ties if copy in tied)}
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]
        ignored += [re.escape(name) + "$" for name, _ in model.named_buffers()]
        others = [
            StoredAs(name, tensor, model.dtype)
            for name, tensor in stored.items()
            if name not in known and not any(re.search(pattern, name) for pattern in ignored)
        ]
        return cls(whole, tuple(others))

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name in the model, as it was before quantization."""
        return name in self.whole

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in the model."""
        return self.whole[name].read()

    def converted(self) -> Iterator[tuple[str, Tensor]]:
        """Give the tensors that have another form on disk than in the model, as they are there."""
        return ((tensor.name, tensor.read()) for tensor in self.in_other_form)

    def fingerprint(self) -> str:
        """Return the fingerprint of the model; hardly anything is read for it."""
        return _fingerprint(
            (name, stored.shape, stored.read_every(_step(stored.shape)).to(dtype))
            for name, stored, dtype in (*self.whole.values(), *self.in_other_form)
        )


@dataclass(frozen=True)
class LoadedWeights:
    """Those of a model in memory.

    :param names: those of its tensors before it is quantized
    """

    model: PreTrainedModel
    names: frozenset[str]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name in the model, as it was before quantization."""
        return name in self.names

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in the model."""
        return read_tensor(self.model, name).detach()

    def converted(self) -> Iterator[tuple[str, Tensor]]:
        """Give the tensors that have another form on disk than in the model, as they are there."""
        for group in dict.fromkeys(tensor_names(self.model).converted.values()):
            yield from converted_back(self.model, {n: self.read(n) for n in group}).items()


WeightSource: TypeAlias = StoredWeights | LoadedWeights
"""Where the values of the tensors of a model come from."""


@dataclass(frozen=True)
class OriginalModel:
    """A float model in its files; opening it reads headers alone.

    :param tensors: by their names on disk
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    trust_remote_code: bool = False

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, trust_remote_code: bool = False
    ) -> OriginalModel:
        """Open a folder; refuse one that holds no model, or a quantized one."""
        folder = Path(path)
        check_location(str(folder))
        if not folder.is_dir():
            raise cannot_load(str(folder), "there is no such folder")
        if read_json_object(folder / "config.json").get("quantization_config") is not None:
            raise ConfigurationError(
                "is quantized itself: its config has a quantization_config",
                subject=f"The model '{folder}'",
                hint="Give the model that the checkpoint was made from.",
            )
        tensors = stored_tensors(folder)
        if not tensors:
            raise cannot_load(str(folder), "there are no safetensors in it")
        return cls(folder, tensors, trust_remote_code)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return Path(os.path.realpath(self.folder)).name

    @property
    def size(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        """How many numbers its tensors hold."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def weight(self, module: str) -> StoredTensor | None:
        """Return the weight of a module; a head that has none of its own is the embedding."""
        weight = self.tensors.get(f"{module}.weight")
        if weight is None and module.rpartition(".")[2] in HEADS:
            names = (
                n for n in self.tensors if n.endswith(tuple(f"{e}.weight" for e in EMBEDDINGS))
            )
            weight = next((self.tensors[name] for name in names), None)
        return weight

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint by which measurements know the model."""
        model = skeleton_of(self.folder, trust_remote_code=self.trust_remote_code)
        own_names = offloaded_tensors(model)
        weights = StoredWeights.of(model, self.tensors, tied_names(model), own_names)
        if weights is None:
            problem = "it does not hold its weights in safetensors as the model has them"
            raise damaged_file(self.folder, problem)
        return weights.fingerprint()


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the fingerprint of a model, which is that of the files it is stored in."""
    return fingerprint_of(checkpoint_tensors(model, tensor_names(model)))


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return what tells the tensors of one checkpoint from those of another, in hex.

    It is made of names, shapes, dtypes and some values. The order does not matter. Of tensors that
    are equal the last name counts, so that it does not matter either whether a tied head is stored
    beside its embedding.

    >>> head, rest = ("head", torch.ones(2)), ("layer", torch.zeros(2))
    >>> fingerprint_of([head, rest, ("norm", torch.ones(2))]) == fingerprint_of(
    ...     [("norm", torch.ones(2)), rest]
    ... )
    True
    """
    return _fingerprint(
        (name, tensor.shape, tensor.detach().reshape(-1)[:: _step(tensor.shape)])
        for name, tensor in tensors
    )


def _fingerprint(samples: Iterable[tuple[str, Sequence[int], Tensor]]) -> str:
    """Return the fingerprint of tensors by their names, shapes and some of their values."""
    names: dict[str, str] = {}
    for name, shape, values in samples:
        digest = hashlib.sha256(f"{list(shape)} {values.dtype}".encode())
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        content = digest.hexdigest()
        names[content] = max(name, names.get(content, ""))
    lines = sorted(f"{name} {content}\n" for content, name in names.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _step(shape: Sequence[int]) -> int:
    return max(1, math.prod(shape) // _VALUES)
