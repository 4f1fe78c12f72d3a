"""Calibration data: whatever the user has becomes batches of token ids."""

from calipers.calibration.data.batches import Batches, calibration_batches, limits_of
from calipers.calibration.data.padding import Batch, counted_tokens

__all__ = ["Batch", "Batches", "calibration_batches", "counted_tokens", "limits_of"]
