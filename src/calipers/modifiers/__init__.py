"""Steps that a recipe is made of."""

from __future__ import annotations

from calipers.modifiers.base import Modifier
from calipers.modifiers.imatrix import IMatrixGatherer
from calipers.modifiers.quantization import QuantizationModifier

__all__ = ["IMatrixGatherer", "Modifier", "QuantizationModifier"]
