"""A step that changes weights before they are quantized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field

from calipers.planning.checks import matches
from calipers.planning.plan import Changes, StepPlan
from calipers.steps import Modifier
from calipers.steps.base import Layer, Patterns


class ClipWeights(Modifier):
    """Cuts the weights of largest magnitude off, which coarse formats pay for.

    :param targets: names of modules, or ``re:`` patterns
    :param share: the share of weights that stay as they are
    """

    targets: Patterns
    share: Annotated[float, Field(gt=0, le=1)] = 0.999

    def target_patterns(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the patterns of what is meant, and of what is not."""
        return self.targets, ()

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:  # noqa: ARG002
        """Ask for every module that is meant; nothing is measured of it."""
        names = [name for target in self.targets for name in matches(model, target)]
        return StepPlan(measured=dict.fromkeys(names, ()))

    def solve(self, layer: Layer) -> Changes:
        """Return the clipped weights."""
        named = dict(layer.model.named_modules())
        names = [name for name in layer.names if self.targets_module(name, named[name])]
        return Changes(
            tensors={(name, "weight"): self._clipped(layer.weight(name)) for name in names}
        )

    def _clipped(self, weight: torch.Tensor) -> torch.Tensor:
        magnitudes = weight.detach().abs().flatten()
        kept = max(1, round(self.share * magnitudes.numel()))
        end = magnitudes.kthvalue(kept).values
        return weight.detach().clamp(-end, end)
