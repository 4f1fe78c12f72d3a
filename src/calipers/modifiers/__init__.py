"""Steps that a recipe is made of."""

from __future__ import annotations

from calipers.modifiers.base import Modifier
from calipers.modifiers.gptq import GPTQModifier
from calipers.modifiers.imatrix import IMatrixGatherer
from calipers.modifiers.quantization import QuantizationModifier

__all__ = ["GPTQModifier", "IMatrixGatherer", "Modifier", "QuantizationModifier"]
