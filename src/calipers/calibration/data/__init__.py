"""Calibration data: whatever the user has becomes batches of token ids."""

from calipers.calibration.data.batches import Batches, calibration_batches, limits_of
from calipers.calibration.data.padding import Batch

__all__ = ["Batch", "Batches", "calibration_batches", "limits_of"]
