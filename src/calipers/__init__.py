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
    from calipers.checkpoint.lint import LintResult, lint
    from calipers.entrypoint import OneshotResult, oneshot
    from calipers.errors import CalipersError, CalipersWarning
    from calipers.evaluation import Evaluation, evaluate
    from calipers.measurements import Measurements
    from calipers.measuring import measure
    from calipers.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier
    from calipers.observers import (
        Observer,
        QParamsDict,
        flatten_for_calibration,
        fuse_weight_observers,
        get_observer_token_count,
    )
    from calipers.quantizing import QuantizeResult, quantize
    from calipers.recipes import Recipe, load_recipe
    from calipers.reporting import Report, report

__version__ = "0.1.0"

__all__ = [
    "Advice",
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
    "Advice": "calipers.advice",
    "CalipersError": "calipers.errors",
    "CalipersWarning": "calipers.errors",
    "Evaluation": "calipers.evaluation",
    "GPTQModifier": "calipers.modifiers",
    "IMatrixGatherer": "calipers.modifiers",
    "LintResult": "calipers.checkpoint.lint",
    "Measurements": "calipers.measurements",
    "Observer": "calipers.observers",
    "OneshotResult": "calipers.entrypoint",
    "QParamsDict": "calipers.observers",
    "QuantizationModifier": "calipers.modifiers",
    "QuantizeResult": "calipers.quantizing",
    "Recipe": "calipers.recipes",
    "Report": "calipers.reporting",
    "advise": "calipers.advice",
    "evaluate": "calipers.evaluation",
    "flatten_for_calibration": "calipers.observers",
    "fuse_weight_observers": "calipers.observers",
    "get_observer_token_count": "calipers.observers",
    "lint": "calipers.checkpoint.lint",
    "load_recipe": "calipers.recipes",
    "measure": "calipers.measuring",
    "oneshot": "calipers.entrypoint",
    "quantize": "calipers.quantizing",
    "report": "calipers.reporting",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'calipers' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
