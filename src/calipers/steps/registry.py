"""The steps that a recipe can name, and those that stand for a method of rounding."""

from __future__ import annotations

from calipers.errors import RecipeError
from calipers.registry import Registry
from calipers.steps.base import Modifier

STEPS: Registry[type[Modifier]] = Registry(
    "modifier",
    "calipers.steps",
    {
        "QuantizationModifier": "calipers.steps.quantization:QuantizationModifier",
        "GPTQModifier": "calipers.steps.gptq:GPTQModifier",
        "IMatrixGatherer": "calipers.steps.imatrix:IMatrixGatherer",
    },
    base=Modifier,
    error=RecipeError,
)
"""The steps by the names of their classes."""


def steps_by_method() -> dict[str, type[Modifier]]:
    """Return the steps that round weights, by the values that ``method`` may have.

    >>> list(steps_by_method())
    ['rtn', 'gptq']
    """
    steps = (step for _, step in STEPS.parts())
    return {vars(step)["method"]: step for step in steps if vars(step).get("method")}
