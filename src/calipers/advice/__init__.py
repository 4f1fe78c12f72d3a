"""Which module is to have which scheme: predictions, and the best choice within a budget."""

from __future__ import annotations

from calipers.advice.advise import Advice, advise
from calipers.advice.choosing import Budget
from calipers.advice.predicting import Prediction

__all__ = ["Advice", "Budget", "Prediction", "advise"]
