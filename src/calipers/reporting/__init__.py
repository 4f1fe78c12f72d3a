"""One page that shows which layer of a quantized model hurts, and why."""

from calipers.linting import Finding
from calipers.reporting.outside import Prediction, Sufficiency
from calipers.reporting.run import Report, report

__all__ = ["Finding", "Prediction", "Report", "Sufficiency", "report"]
