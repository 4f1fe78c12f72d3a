"""What an evaluation found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from calipers.errors import counted
from calipers.evaluation.bootstrap import Bootstrap, Difference, Estimate, Sums
from calipers.evaluation.scoring import LayerError
from calipers.notebook import NotebookView

BASE = ""
"""The name of the float model among those of the checkpoints."""


def key(kind: str, name: str) -> str:
    """Return the name of a sum over samples that belongs to a checkpoint."""
    return f"{kind} of {name}"


def perplexity(sums: Sums, name: str) -> Tensor:
    """Return the perplexity of a checkpoint."""
    return (sums[key("nll", name)] / sums["tokens"]).exp()


def difference(bootstrap: Bootstrap, one: str, other: str, noise: float) -> Difference:
    """Return by how much the perplexity of one checkpoint lies above that of another."""
    estimate = bootstrap.estimate(lambda sums: perplexity(sums, one) - perplexity(sums, other))
    return Difference(**vars(estimate), noise=noise)


@dataclass(frozen=True)
class Scores:
    """Figures of a model.

    :param size: bytes of its tensors on disk; None for a model that was not loaded from a folder
    :param perplexity: per token
    :param noise: how far the perplexity may be off because of nothing but roundings
    """

    size: int | None
    perplexity: Estimate
    noise: float = field(default=0.0, kw_only=True)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        figures = {
            n: each.as_dict() for n, each in vars(self).items() if isinstance(each, Estimate)
        }
        noise = self.noise if math.isfinite(self.noise) else None
        return {"size": self.size, "noise": noise, **figures}


@dataclass(frozen=True)
class CheckpointScores(Scores):
    """Figures of a checkpoint beside the float model.

    :param change: of the perplexity
    :param kl: the divergence of its predictions from those of the float model, KL(float‖checkpoint)
        in nats per token
    :param agreement: the share of tokens for which both have the same favourite
    :param layers: the errors of decoder layers, in order; empty where they were not asked for
    :param notes: what must be known of how it was loaded and computed
    :param reliable: whether transformers computes what the checkpoint says; the figures are those
        of what it computes
    """

    change: Difference
    kl: Estimate
    agreement: Estimate
    layers: tuple[LayerError, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    reliable: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        layers = {"layers": [asdict(layer) for layer in self.layers]} if self.layers else {}
        about = {"reliable": self.reliable, "notes": list(self.notes)}
        return {**super().as_dict(), **about, **layers}


@dataclass(frozen=True)
class Evaluation(NotebookView):
    """What an evaluation found.

    :param checkpoints: in the order in which they were given; those that are done
    :param samples: how many samples were run, and drawn from for the intervals
    :param tokens: how many tokens were predicted
    :param vocabulary: how many tokens there are to choose from; None where it is not known
    """

    base: Scores
    checkpoints: Mapping[str, CheckpointScores]
    samples: int
    tokens: int
    _bootstrap: Bootstrap = field(repr=False)
    vocabulary: int | None = None

    def __repr__(self) -> str:
        scores = [
            f"{name} {each.perplexity.value:.4f} ({each.change.text('+.4f')})"
            for name, each in self.checkpoints.items()
        ]
        base = f"perplexity {self.base.perplexity.value:.4f}"
        return f"Evaluation({'; '.join([self.amount, base, *scores])})"

    @property
    def amount(self) -> str:
        """How much was evaluated, in words."""
        return f"{counted(self.samples, 'sample')}, {self.tokens:,} tokens predicted"

    @property
    def is_worse_than_chance(self) -> bool:
        """Whether the float model predicts worse than one that gives all tokens the same chance."""
        return self.vocabulary is not None and self.base.perplexity.value > self.vocabulary

    def difference(self, one: str, other: str) -> Difference:
        """Return by how much the perplexity of one checkpoint lies above that of another.

        The noise floor is that of the noisier of the two; other checkpoints do not count.
        """
        noise = max(self.checkpoints[name].noise for name in (one, other))
        return difference(self._bootstrap, one, other, noise if one != other else 0.0)

    def above_best(self) -> dict[str, Difference]:
        """Return by how much the perplexity of each checkpoint lies above the least of them."""
        values = {name: scores.perplexity.value for name, scores in self.checkpoints.items()}
        return {name: self.difference(name, min(values, key=values.__getitem__)) for name in values}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        above = self.above_best()
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "vocabulary": self.vocabulary,
            "worse_than_chance": self.is_worse_than_chance,
            "base": self.base.as_dict(),
            "checkpoints": {
                name: {**scores.as_dict(), "above_best": above[name].as_dict()}
                for name, scores in self.checkpoints.items()
            },
        }
