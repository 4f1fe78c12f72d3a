"""What was seen of a model, by module and tensor."""

from calipers.measurements.info import MeasurementsInfo
from calipers.measurements.store import Measurements

__all__ = ["Measurements", "MeasurementsInfo"]
