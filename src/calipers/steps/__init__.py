"""Steps that a recipe is made of."""

from __future__ import annotations

from calipers.steps.base import Modifier
from calipers.steps.gptq import GPTQModifier
from calipers.steps.imatrix import IMatrixGatherer
from calipers.steps.quantization import QuantizationModifier
from calipers.steps.rounding import AutoRoundModifier
from calipers.steps.transforms.awq import AWQModifier
from calipers.steps.transforms.smoothquant import SmoothQuantModifier
from calipers.steps.transforms.spinquant import SpinQuantModifier
from calipers.steps.tuning import TuningModifier

__all__ = [
    "AWQModifier",
    "AutoRoundModifier",
    "GPTQModifier",
    "IMatrixGatherer",
    "Modifier",
    "QuantizationModifier",
    "SmoothQuantModifier",
    "SpinQuantModifier",
    "TuningModifier",
]
