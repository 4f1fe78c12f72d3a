"""By what a model is known: names, shapes, dtypes and some values of what its files hold."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calipers.checkpoint.compression import checkpoint_tensors, tensor_names
from calipers.files.safetensors_header import StoredTensor

_VALUES = 16
"""How many values of a tensor are looked at, at least."""


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
