"""What an evaluation found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from calipers.evaluation.bootstrap import Bootstrap, Estimate, Sums
from calipers.evaluation.layers import LayerError
from calipers.evaluation.notebook import as_html, in_one_line

BASE = ""
"""The name of the float model among those of the checkpoints."""


def key(kind: str, name: str) -> str:
    """Return the name of a sum over samples that belongs to a checkpoint."""
    return f"{kind} of {name}"


def perplexity(sums: Sums, name: str) -> Tensor:
    """Return the perplexity of a checkpoint."""
    return (sums[key("nll", name)] / sums["tokens"]).exp()


@dataclass(frozen=True)
class Scores:
    """Figures of a model.

    :param size: bytes of its tensors on disk; None for a model that was not loaded from a folder
    :param perplexity: per token
    """

    size: int | None
    perplexity: Estimate


@dataclass(frozen=True)
class CheckpointScores(Scores):
    """Figures of a checkpoint beside the float model.

    :param change: of the perplexity
    :param kl: the divergence of its predictions from those of the float model, KL(float‖checkpoint)
        in nats per token
    :param agreement: the share of tokens for which both have the same favourite
    :param layers: the errors of decoder layers, in order; empty where they were not asked for
    """

    change: Estimate
    kl: Estimate
    agreement: Estimate
    layers: tuple[LayerError, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    :param checkpoints: in the order in which they were given
    :param samples: how many samples were run, and drawn from for the intervals
    :param tokens: how many tokens were predicted
    """

    base: Scores
    checkpoints: Mapping[str, CheckpointScores]
    samples: int
    tokens: int
    _bootstrap: Bootstrap = field(repr=False)

    def __repr__(self) -> str:
        return in_one_line(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def difference(self, one: str, other: str) -> Estimate:
        """Return by how much the perplexity of one checkpoint lies above that of another."""
        return self._bootstrap.estimate(
            lambda sums: perplexity(sums, one) - perplexity(sums, other)
        )

    def above_best(self) -> dict[str, Estimate]:
        """Return by how much the perplexity of each checkpoint lies above the least of them."""
        values = {name: scores.perplexity.value for name, scores in self.checkpoints.items()}
        return {name: self.difference(name, min(values, key=values.__getitem__)) for name in values}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        above = self.above_best()
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "base": _plain(self.base),
            "checkpoints": {
                name: {**_plain(scores), "above_best": above[name].as_dict()}
                for name, scores in self.checkpoints.items()
            },
        }


def _plain(scores: Scores) -> dict[str, Any]:
    figures = {
        name: each.as_dict() for name, each in vars(scores).items() if isinstance(each, Estimate)
    }
    layers = [asdict(layer) for layer in getattr(scores, "layers", ())]
    return {"size": scores.size, **figures, **({"layers": layers} if layers else {})}
