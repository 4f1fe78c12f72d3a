"""Bad input gets a clear error, the model stays as it was, and nothing is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from families import Untouched
from transformers import PreTrainedModel

import calipers
from calipers import errors

FAMILIES = pytest.mark.parametrize("family", ["llama", "llama tied", "mixtral"])


def modifiers(*each: dict[str, Any]) -> dict[str, Any]:
    return {"modifiers": [{"QuantizationModifier": options} for options in each]}


FP8 = modifiers({"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "FP8"})


def refused(
    error: type[Exception],
    text: str,
    model: Any,
    recipe: Any,
    dataset: Any = None,
    *,
    output: Path,
    **options: Any,
) -> None:
    """The call fails with this error and text; model and disk are as they were."""
    untouched = Untouched(model) if isinstance(model, PreTrainedModel) else None
    beside = sorted(output.parent.rglob("*")) if output.parent.exists() else None
    with pytest.raises(error, match=re.escape(text)) as caught:
        calipers.oneshot(model, recipe, dataset, output_dir=output, progress=False, **options)
    assert isinstance(caught.value, errors.CalipersError)
    assert caught.value.exit_code != 0
    if untouched is not None:
        untouched.check()
    assert (sorted(output.parent.rglob("*")) if output.parent.exists() else None) == beside
