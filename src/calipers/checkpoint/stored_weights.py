"""Where the tensors of a model are: in its files, each read when it is asked for, or in memory."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calipers.checkpoint.compression import checkpoint_tensors, tensor_names
from calipers.checkpoint.state import (
    StoredNames,
    converted_back,
    offloaded_tensors,
    read_tensor,
    stored_names,
)
from calipers.files.safetensors_header import StoredTensor

_VALUES = 16
"""How many values of a tensor are looked at, at least."""


class WeightSource(Protocol):
    """Where the values of the tensors of a model come from."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name in the model, as it was before quantization."""

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in the model."""

    def converted(self) -> Iterator[tuple[str, Tensor]]:
        """Give the tensors that have another form on disk than in the model, as they are there."""

    def fingerprint(self) -> str:
        """Return by what the model is known."""


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
            found = next((each for each in candidates if each in stored), None)
            if found is None:
                return None
            whole[name] = StoredAs(found, stored[found], tensors[name].dtype)
        known = {*names.renamed.values(), *(tied[copy] for copy in ties if copy in tied)}
        rest = _in_other_form(model, names, stored, known)
        return cls(whole, tuple(StoredAs(n, stored[n], model.dtype) for n in rest))

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name in the model, as it was before quantization."""
        return name in self.whole

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in the model."""
        return self.whole[name].read()

    def converted(self) -> Iterator[tuple[str, Tensor]]:
        """Give the tensors that have another form on disk than in the model, as they are there."""
        return ((each.name, each.read()) for each in self.in_other_form)

    def fingerprint(self) -> str:
        """Return by what the model is known."""
        return stored_fingerprint([*self.whole.values(), *self.in_other_form])


def _in_other_form(
    model: PreTrainedModel,
    names: StoredNames,
    stored: Iterable[str],
    known: set[str],
) -> list[str]:
    """Return what the files hold instead of tensors that transformers converts."""
    if not names.converted:
        return []
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]
    ignored += [re.escape(name) + "$" for name, _ in model.named_buffers()]
    unknown = (name for name in stored if name not in known)
    return [name for name in unknown if not any(re.search(each, name) for each in ignored)]


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

    def fingerprint(self) -> str:
        """Return by what the model is known."""
        return model_fingerprint(self.model)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the fingerprint of a model, which is that of the files it is stored in."""
    return fingerprint_of(checkpoint_tensors(model, tensor_names(model)))


def stored_fingerprint(tensors: Iterable[tuple[str, StoredTensor, torch.dtype]]) -> str:
    """Return the fingerprint of a model from its files, of which hardly anything is read.

    :param tensors: their names, where they are, and the dtypes that they have in the model
    """
    return _fingerprint(
        (name, _digest(stored.shape, stored.read_every(_step(stored.shape)).to(dtype)))
        for name, stored, dtype in tensors
    )


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return what tells the tensors of one checkpoint from those of another, in hex.

    Their order does not matter. Of tensors that are equal the last name counts, so that it does not
    matter either whether a tied head is stored beside its embedding.

    >>> head, rest = ("head", torch.ones(2)), ("layer", torch.zeros(2))
    >>> fingerprint_of([head, rest, ("norm", torch.ones(2))]) == fingerprint_of(
    ...     [("norm", torch.ones(2)), rest]
    ... )
    True
    """
    return _fingerprint(
        (name, _digest(tensor.shape, tensor.detach().reshape(-1)[:: _step(tensor.shape)]))
        for name, tensor in tensors
    )


def _fingerprint(digests: Iterable[tuple[str, str]]) -> str:
    names: dict[str, str] = {}
    for name, content in digests:
        names[content] = max(name, names.get(content, ""))
    lines = sorted(f"{name} {content}\n" for content, name in names.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _step(shape: Sequence[int]) -> int:
    return max(1, math.prod(shape) // _VALUES)


def _digest(shape: Sequence[int], values: Tensor) -> str:
    digest = hashlib.sha256(f"{list(shape)} {values.dtype}".encode())
    digest.update(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
