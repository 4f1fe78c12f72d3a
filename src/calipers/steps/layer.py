"""What a step of a recipe is given to solve, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from compressed_tensors.offload import disable_onloading
from torch import Tensor

from calipers.measurements import Measurements
from calipers.planning.plan import Changes, QParams
from calipers.planning.specs import ModuleSpec
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import Ranks

if TYPE_CHECKING:
    from calipers.steps.feedback import CurvatureCache

__all__ = ["Changes", "Layer", "QParams"]


@dataclass(frozen=True)
class Layer:
    """Modules whose data has run: those of a decoder layer, or all of a model.

    :param modules: those that the step quantizes, with the tensors that it solves
    :param names: all whose data has run, also those that are measured only
    :param unseen: those that no token has reached, and what was done about it
    :param new_tensors: (module, tensor) → the value that an earlier step has given it
    :param curvatures: factorised Hessians that others solve with, too; None: there are no others
    """

    model: torch.nn.Module
    modules: tuple[ModuleSpec, ...]
    names: tuple[str, ...]
    measurements: Measurements
    ranks: Ranks
    progress: Progress
    unseen: Mapping[str, str] = field(default_factory=dict)
    new_tensors: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)
    curvatures: CurvatureCache | None = None

    def module(self, name: str) -> torch.nn.Module:
        """Return a module by its name."""
        return self.model.get_submodule(name)

    def weight(self, name: str) -> Tensor:
        """Return the weight of a module as earlier steps left it, loaded if it was offloaded."""
        return self.tensor(name, "weight")

    def tensor(self, name: str, tensor: str) -> Tensor:
        """Return a parameter or buffer of a module as earlier steps left it."""
        if (name, tensor) in self.new_tensors:
            return self.new_tensors[name, tensor]
        value = getattr(self.module(name), tensor)
        assert isinstance(value, Tensor)
        return value

    def size(self, module: ModuleSpec) -> int:
        """Return how many numbers the weight of a module has, without loading it."""
        with disable_onloading():
            return self.weight(module.name).numel()

    def of_step(self, step: str) -> Layer:
        """Return what concerns one step."""
        mine = (module.of_step(step) for module in self.modules)
        return replace(self, modules=tuple(module for module in mine if module.tensors))
