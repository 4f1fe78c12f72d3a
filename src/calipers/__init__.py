"""Calipers: observers that find the quantization parameters of language models.

Importing this package loads nothing else; each public name is imported when first used.

>>> import calipers
>>> "minmax" in calipers.Observer.registered_names()
True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calipers.advice import Advice, advise
    from calipers.engine.loop import OneshotResult, QuantizeResult
    from calipers.engine.measure import measure
    from calipers.engine.oneshot import oneshot
    from calipers.engine.quantize import quantize
    from calipers.errors import CalipersError, CalipersWarning
    from calipers.evaluation import Evaluation, evaluate
    from calipers.linting import LintResult, lint
    from calipers.measurements import Measurements
    from calipers.observers import (
        Observer,
        QParamsDict,
        flatten_for_calibration,
        fuse_weight_observers,
        get_observer_token_count,
    )
    from calipers.recipes import Recipe, load_recipe
    from calipers.reporting import Report, report
    from calipers.steps import (
        AutoRoundModifier,
        AWQModifier,
        GPTQModifier,
        IMatrixGatherer,
        QuantizationModifier,
        SmoothQuantModifier,
        SpinQuantModifier,
        TuningModifier,
    )

__version__ = "0.1.0"

__all__ = [
    "AWQModifier",
    "Advice",
    "AutoRoundModifier",
    "CalipersError",
    "CalipersWarning",
    "Evaluation",
    "GPTQModifier",
    "IMatrixGatherer",
    "LintResult",
    "Measurements",
    "Observer",
    "OneshotResult",
    "QParamsDict",
    "QuantizationModifier",
    "QuantizeResult",
    "Recipe",
    "Report",
    "SmoothQuantModifier",
    "SpinQuantModifier",
    "TuningModifier",
    "__version__",
    "advise",
    "evaluate",
    "flatten_for_calibration",
    "fuse_weight_observers",
    "get_observer_token_count",
    "lint",
    "load_recipe",
    "measure",
    "oneshot",
    "quantize",
    "report",
]

_HOMES = {
    "AWQModifier": "calipers.steps",
    "Advice": "calipers.advice",
    "AutoRoundModifier": "calipers.steps",
    "CalipersError": "calipers.errors",
    "CalipersWarning": "calipers.errors",
    "Evaluation": "calipers.evaluation",
    "GPTQModifier": "calipers.steps",
    "IMatrixGatherer": "calipers.steps",
    "LintResult": "calipers.linting",
    "Measurements": "calipers.measurements",
    "Observer": "calipers.observers",
    "OneshotResult": "calipers.engine.loop",
    "QParamsDict": "calipers.observers",
    "QuantizationModifier": "calipers.steps",
    "QuantizeResult": "calipers.engine.loop",
    "Recipe": "calipers.recipes",
    "Report": "calipers.reporting",
    "SmoothQuantModifier": "calipers.steps",
    "SpinQuantModifier": "calipers.steps",
    "TuningModifier": "calipers.steps",
    "advise": "calipers.advice",
    "evaluate": "calipers.evaluation",
    "flatten_for_calibration": "calipers.observers",
    "fuse_weight_observers": "calipers.observers",
    "get_observer_token_count": "calipers.observers",
    "lint": "calipers.linting",
    "load_recipe": "calipers.recipes",
    "measure": "calipers.engine.measure",
    "oneshot": "calipers.engine.oneshot",
    "quantize": "calipers.engine.quantize",
    "report": "calipers.reporting",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'calipers' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
