"""The modifier that moves outliers from activations into weights."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from calipers.errors import RecipeError
from calipers.planning.plan import Plan
from calipers.planning.specs import Requirement
from calipers.solvers.equalization import logarithmic_factors, smoothing_factors
from calipers.statistics.ranges import Extrema
from calipers.steps.base import Layer
from calipers.steps.transforms.folding import ChosenFold, EqualizingModifier, FoldMapping

_KEY = "channel_extrema"
_CHANNELS = QuantizationArgs(num_bits=8, strategy="group", group_size=1)
_PASSED_OVER = ("num_calibration_steps", "requires_calibration_data")


class SmoothMapping(FoldMapping):
    """A pair of readers and source, as recipes of SmoothQuant have it."""

    def to_data(self) -> Any:
        """Return the pair as plain data."""
        return [list(self.balance_layers), self.smooth_layer]


class SmoothQuantModifier(EqualizingModifier):
    """Divides channels by rangeᵅ / max|w|¹⁻ᵅ, so that activations have fewer outliers.

    :param smoothing_strength: α: 0 leaves activations as they are, 1 gives all channels one range
    :param mappings: pairs of the modules that read, and of the one whose output they read
    :param algorithm: ``log_equalization`` divides by range / log2(2 + range) instead
    :param num_calibration_steps: accepted; the data that are given are used
    """

    smooths_experts_together: ClassVar[bool] = False

    smoothing_strength: Annotated[float, Field(ge=0, le=1)] = 0.5
    mappings: Annotated[tuple[SmoothMapping, ...] | None, BeforeValidator(SmoothMapping.read)] = (
        None
    )
    algorithm: Literal["smoothquant", "log_equalization"] = "smoothquant"

    @model_validator(mode="before")
    @classmethod
    def _pass_over(cls, given: Any) -> Any:
        """Pass over keys of llm-compressor that change nothing here."""
        if given.get("calibration_function") is not None:
            raise RecipeError(
                "is a function, and data runs through the model in one way",
                subject=f"{cls.__name__}.calibration_function",
                hint="Leave it out",
                path=("calibration_function",),
            )
        passed = (*_PASSED_OVER, "calibration_function")
        return {key: value for key, value in given.items() if key not in passed}

    def requirements(self, reader: str, plan: Plan) -> tuple[Requirement, ...]:  # noqa: ARG002
        """Ask for the extrema of each channel."""
        return (Requirement("input", _KEY, partial(_extrema, label=self.label())),)

    def factors(self, layer: Layer, chosen: ChosenFold) -> tuple[Tensor, dict[str, Any]] | None:
        """Return the factors of a fold; None where no token has reached it."""
        ranges = _ranges(layer, chosen)
        if ranges is None:
            return None
        if self.algorithm == "log_equalization":
            return logarithmic_factors(ranges), {"algorithm": self.algorithm}
        magnitudes = column_magnitudes(layer, chosen)
        factors = smoothing_factors(ranges, magnitudes, self.smoothing_strength)
        return factors, {"strength": self.smoothing_strength}


def _extrema(name: str, label: str) -> Extrema:
    statistic = Extrema("input", _CHANNELS)
    statistic.owner = f"{label} (input of {name})"
    return statistic


def _ranges(layer: Layer, chosen: ChosenFold) -> Tensor | None:
    """Return max − min of each channel over all that read it; None where nothing was seen."""
    low: Tensor | None = None
    high: Tensor | None = None
    for name in chosen.readers:
        seen = layer.measurements.get(name, "input", _KEY)
        if isinstance(seen, Extrema) and seen.num_tokens:
            fields = seen.fields()
            least, most = fields["min_vals"].double().cpu(), fields["max_vals"].double().cpu()
            low = least if low is None else torch.minimum(low, least)
            high = most if high is None else torch.maximum(high, most)
    if low is None or high is None:
        return None
    fold = chosen.fold
    return fold.by_channel(high).amax(1) - fold.by_channel(low).amin(1)


def column_magnitudes(layer: Layer, chosen: ChosenFold) -> Tensor:
    """Return max|w| of the columns that read each channel."""
    weights = (layer.weight(name).detach() for name in chosen.readers)
    columns = torch.stack([weight.abs().amax(0).double().cpu() for weight in weights]).amax(0)
    return chosen.fold.by_channel(columns).amax(1)
