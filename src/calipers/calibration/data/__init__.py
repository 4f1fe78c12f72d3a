"""Calibration data: whatever the user has becomes batches of token ids."""

from calipers.calibration.data.batches import (
    Batch,
    Batches,
    calibration_batches,
    counted_tokens,
    limits_of,
)

__all__ = ["Batch", "Batches", "calibration_batches", "counted_tokens", "limits_of"]
