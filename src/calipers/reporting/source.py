"""The model that checkpoints were made from: its weights, if its files are at hand."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.location import check_location
from calipers.checkpoint.quantized_weight import QuantizedWeight
from calipers.checkpoint.reader import load_skeleton, refuse_quantized
from calipers.checkpoint.state import offloaded_tensors
from calipers.checkpoint.stored_module import StoredModule
from calipers.checkpoint.stored_weights import StoredWeights
from calipers.checkpoint.ties import tied_names
from calipers.checkpoint.unknown_model import unknown_model
from calipers.errors import MeasurementsError, damaged_file
from calipers.kernels.moments import sum_of_squares
from calipers.measurements import Measurements


@dataclass(frozen=True)
class SourceModel:
    """A model in its files.

    :param size: the bytes of its tensors
    :param parameters: how many numbers they are
    """

    name: str
    size: int
    parameters: int
    weights: StoredWeights

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> SourceModel:
        """Open the folder of a model; refuse one that is quantized, or no model."""
        folder = Path(path)
        check_location(str(folder))
        unknown = unknown_model(folder)
        if unknown is not None:
            refuse_quantized(unknown.config, str(folder))
        model = unknown or load_skeleton(folder, trust_remote_code=trust_remote_code)
        stored = stored_tensors(folder)
        found = StoredWeights.of(model, stored, tied_names(model), offloaded_tensors(model))
        if found is None:
            problem = "it does not hold its weights in safetensors as the model has them"
            raise damaged_file(folder, problem)
        sizes = [math.prod(tensor.shape) for tensor in stored.values()]
        total = sum(tensor.size for tensor in stored.values())
        return cls(Path(os.path.realpath(folder)).name, total, sum(sizes), found)

    def weight(self, module: str) -> Tensor | None:
        """Read the weight of a module; None if it has none."""
        name = f"{module}.weight"
        return self.weights.read(name).detach() if self.weights.has(name) else None

    def check_measured(self, measurements: Measurements) -> None:
        """Refuse measurements of another model, or of other weights of it."""
        info, own = measurements.info, self.weights.fingerprint()
        if info is None or info.fingerprint == own:
            return
        raise MeasurementsError(
            f"are of another model, or of other weights of it: {info.model} with the fingerprint "
            f"{info.fingerprint[:8]}, and the source '{self.name}' has {own[:8]}",
            subject="The measurements",
            hint="Measure this model, or give the source that was measured.",
        )


@dataclass(frozen=True)
class Loss:
    """What a weight lost, found by comparing it with the one it was made from.

    :param weight: ‖Q(W) − W‖ / ‖W‖
    :param output: the relative error of the output, if E[x²] of its input is known. Errors of
        channels count as independent of each other
    """

    weight: float
    output: float | None = None


def stored_weight(module: StoredModule) -> Tensor | None:
    """Return the weight of a module as whoever loads the checkpoint computes with it."""
    if module.weights is None:
        return module.read("weight")
    is_matrix = module.is_sound and len(module.shape or ()) == 2
    return QuantizedWeight.of(module).dequantized() if is_matrix else None


def loss_of(
    before: Tensor, after: Tensor, energies: Tensor | None, output: float | None
) -> Loss | None:
    """Compare a weight with what became of it; None where they have different shapes.

    :param energies: E[x²] of each channel of the input
    :param output: E‖y‖² of the output; estimated from the weight where it was not measured

    >>> import torch
    >>> before, after = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])
    >>> loss_of(before, after, torch.tensor([4.0, 4.0]).double(), None)
    Loss(weight=0.1, output=0.1)
    """
    if before.shape != after.shape or before.ndim != 2:
        return None
    lost = sum_of_squares(after.float() - before.float()).cpu().double()
    kept = sum_of_squares(before).cpu().double()
    whole = float(kept.sum())
    weight = math.sqrt(float(lost.sum()) / whole) if whole else 0.0
    if energies is None or len(energies) != len(lost):
        return Loss(weight)
    energy = float((kept * energies).sum()) if output is None else output
    return Loss(weight, math.sqrt(float((lost * energies).sum()) / energy) if energy else 0.0)
