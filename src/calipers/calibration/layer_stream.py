"""The data of one decoder layer, for steps that work on the layer as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from calipers.calibration.partial_forward import QuantizedForward


@dataclass(frozen=True)
class LayerStream:
    """What goes into a layer whose predecessors are quantized, and what it is meant to give.

    Batches are numbered from 0; each holds whole samples, those of this process. What
    :meth:`outputs` and :meth:`target` return is where the batches are.

    :param name: that of the layer
    :param device: where it computes
    :param targets: what the float layer makes of float inputs, by batch
    :param masks: which tokens count, by batch
    :param run: runs a batch through the layer
    :param solved: what the tensors of the layer have become
    :param ready: has the layer ready to compute, and measures nothing
    """

    name: str
    device: torch.device
    targets: Sequence[Tensor]
    masks: Sequence[Tensor]
    run: Callable[[int], Tensor]
    solved: QuantizedForward
    ready: Callable[[], AbstractContextManager[None]]

    def at_work(self) -> AbstractContextManager[None]:
        """Have the layer ready to compute: :meth:`outputs` is called within."""
        return self.ready()

    def outputs(self, batch: int, tensors: Mapping[tuple[str, str], Tensor]) -> Tensor:
        """Return what the layer makes of a batch, of tokens that count: (tokens, width).

        :param tensors: (module, tensor) → what it computes with instead of what was solved; with
            gradients, if they require them and gradients are enabled
        """
        with self.solved.replaced(tensors).in_place():
            return self._counted(batch, self.run(batch))

    def target(self, batch: int) -> Tensor:
        """Return what the layer is meant to make of a batch, in the form of :meth:`outputs`."""
        return self._counted(batch, self.targets[batch])

    def samples(self, batch: int) -> int:
        """Return how many samples a batch has."""
        return len(self.masks[batch])

    def __len__(self) -> int:
        return len(self.masks)

    def _counted(self, batch: int, hidden: Tensor) -> Tensor:
        mask = self.masks[batch].to(hidden.device)
        return hidden.reshape(*mask.shape, -1)[mask.bool()]
