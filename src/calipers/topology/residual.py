"""The residual stream of a model: what writes to it, what reads it, and behind which norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from calipers.errors import ConfigurationError
from calipers.topology.folding import Fold, Folds, _in_place
from calipers.topology.names import HEADS

_WRITERS = ("o_proj", "out_proj", "down_proj", "w2", "fc2")


@dataclass(frozen=True)
class ResidualStream:
    """What reads and writes the stream of a model that can be rotated as a whole.

    :param folds: norms that read it, each with the matrices that read the norm
    :param writers: Linears whose output is added to it
    """

    size: int
    embedding: str
    folds: tuple[Fold, ...]
    writers: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ResidualStream:
        """Find it; a model of which any part is not known is refused by the name of that part."""
        modules = dict(model.named_modules())
        embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
        name = next((n for n, m in modules.items() if m is embedding), None)
        if name is None or not isinstance(embedding, nn.Embedding):
            raise _cannot("it has no embedding that is known")
        size = embedding.weight.shape[1]
        folds = Folds.of(model)
        norms = tuple(each for each in folds.found if each.kind == "norm")
        norms = tuple(each for each in norms if each.channels == size)
        sources = {each.source for each in norms}
        readers = {reader for each in norms for reader in each.readers}
        writers = []
        for each, module in modules.items():
            weight = module._parameters.get("weight")
            own = each.rpartition(".")[2]
            if any(p is not None and p.ndim > 2 for p in module._parameters.values()):
                raise _cannot(f"'{each}' stacks experts", "Quantize the experts, too")
            if weight is None or each == name or each in readers:
                continue
            if weight.ndim == 1 and weight.shape[0] == size and each not in sources:
                unknown = "what reads this norm is not known, or it normalizes a result"
                raise _cannot(f"'{each}': {folds.obstacles.get(each, unknown)}")
            if weight.ndim == 2 and size in weight.shape and own in _WRITERS:
                writers.append(each)
            elif weight.ndim == 2 and size in weight.shape:
                raise _cannot(f"what '{each}' has to do with the residual stream is not known")
        if not any(head in readers for head in HEADS):
            raise _cannot("the norm in front of its head is not known, or shared")
        for each in norms:
            if not _commutes(modules[each.source]):
                kind = type(modules[each.source]).__name__
                raise _cannot(f"'{each.source}' ({kind}) subtracts a mean, or has a bias")
        return cls(size, name, norms, tuple(writers))

    @property
    def norm_of(self) -> Mapping[str, Fold]:
        """Each matrix that reads the stream, with the norm in front of it."""
        return {reader: fold for fold in self.folds for reader in fold.readers}


def _cannot(problem: str, hint: str = "Equalize it instead (SmoothQuantModifier)") -> Exception:
    return ConfigurationError(
        f"cannot be rotated: {problem}", subject="The residual stream", hint=hint
    )


@torch.no_grad()
def _commutes(norm: nn.Module) -> bool:
    """Whether a norm without gain gives the rotated result for a rotated input."""
    weight = norm._parameters["weight"]
    assert weight is not None
    if norm._parameters.get("bias") is not None:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, weight.shape[0], generator=generator) + 0.5
    flipped = torch.where(torch.rand(weight.shape[0], generator=generator) < 0.5, -1.0, 1.0)

    def out(value: Tensor) -> Tensor:
        with _in_place(norm, {"weight": torch.ones(weight.shape[0])}):
            result: Tensor = type(norm).forward(norm, value)
        return result

    # A change of signs is orthogonal, and moves the mean.
    return torch.allclose(out(x * flipped), out(x) * flipped, rtol=1e-4, atol=1e-5)
