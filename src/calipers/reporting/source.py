"""The model that checkpoints were made from: its weights, if its files are at hand."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.location import check_location
from calipers.checkpoint.reader import load_skeleton, refuse_quantized
from calipers.checkpoint.state import offloaded_tensors, tied_names
from calipers.checkpoint.stored_module import StoredModule
from calipers.checkpoint.stored_weights import StoredWeights
from calipers.checkpoint.unknown_model import unknown_model
from calipers.errors import MeasurementsError, damaged_file
from calipers.judging.streams import Streams
from calipers.judging.weights import WeightLoss, stored_weight_loss
from calipers.linting.against import stored_loss
from calipers.linting.codes import grid_of
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


def loss_of(module: StoredModule, original: Tensor, streams: Streams | None) -> WeightLoss | None:
    """Compare the weight of a module with what became of it; None where that cannot be done."""
    if module.weights is None:  # only its input is quantized
        kept = module.read("weight")
        if kept is None or kept.shape != original.shape:
            return None
        return stored_weight_loss([(original, kept)], original, streams)
    if not module.is_sound or grid_of(module.weights) is None:
        return None
    return stored_loss(module, original, streams)
