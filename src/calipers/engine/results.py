"""What quantizing a model has come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calipers.calibration.coverage import Coverage
from calipers.checkpoint.source import source_folder
from calipers.engine.driver import Solution
from calipers.judging.costs import ModuleCosts
from calipers.notebook import NotebookView
from calipers.planning.plan import Plan
from calipers.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class OneshotResult(NotebookView):
    """What ``oneshot`` or ``quantize`` did.

    :param model: the frozen model, which computes with fake quantization; where it went from disk
        to disk, its tensors have no values (they are on the meta device)
    :param plan: what was quantized, how, and by which observers
    :param coverage: how many tokens each module saw
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param recipe: the recipe, as it was carried out
    :param output_dir: where the checkpoint is, if one was asked for
    :param costs: module → what its static activations and its output lose, where data ran
    :param notes: module → what was done otherwise than the recipe says, and why
    :param pipeline: how data ran; ``measurements`` where it had run before, ``datafree`` where none
        was needed
    :param samples: how many samples were seen, and ``tokens`` how many tokens
    :param forward_dtype: in which the model computed; None: it did not
    :param seconds: how long it took
    """

    model: PreTrainedModel
    plan: Plan
    coverage: Coverage
    errors: Mapping[str, float]
    recipe: Recipe
    output_dir: Path | None = None
    costs: Mapping[str, ModuleCosts] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    pipeline: str = "datafree"
    samples: int = 0
    tokens: int = 0
    forward_dtype: torch.dtype | None = None
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        solution: Solution,
        recipe: Recipe,
        output_dir: Path | None,
        seconds: float,
    ) -> OneshotResult:
        """Return what a solution has made of a model."""
        return cls(
            model,
            solution.plan,
            solution.coverage,
            solution.errors,
            recipe,
            output_dir,
            solution.costs,
            solution.changes.notes,
            solution.pipeline,
            solution.samples,
            solution.tokens,
            solution.forward_dtype,
            seconds,
        )

    @property
    def dtype(self) -> torch.dtype:
        """That of the model."""
        return self.model.dtype

    @property
    def source(self) -> Path | None:
        """The folder that the model came from, if it is at hand."""
        return source_folder(self.model)

    def __repr__(self) -> str:
        return f"OneshotResult({', '.join(f'{key}: {fact}' for key, fact in self.facts().items())})"

    def facts(self) -> dict[str, object]:
        """Return what matters most, by its name."""
        facts = {"model": type(self.model).__name__, "plan": self.plan, "coverage": self.coverage}
        if self.errors:
            facts["largest error of a weight"] = f"{max(self.errors.values()):.2%}"
        return facts if self.output_dir is None else {**facts, "written to": self.output_dir}


QuantizeResult = OneshotResult
