"""By what a model is known: names, shapes, dtypes and some values of what its files hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calipers.checkpoint.compression import checkpoint_tensors, tensor_names

_VALUES = 16
"""How many values of a tensor are looked at, at least."""


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the fingerprint of a model, which is that of the files it is stored in."""
    return fingerprint_of(checkpoint_tensors(model, tensor_names(model)))


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
    names: dict[str, str] = {}
    for name, tensor in tensors:
        content = _digest(tensor)
        names[content] = max(name, names.get(content, ""))
    lines = sorted(f"{name} {content}\n" for content, name in names.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _VALUES)]
    digest = hashlib.sha256(f"{list(tensor.shape)} {tensor.dtype}".encode())
    digest.update(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
