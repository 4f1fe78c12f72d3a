"""The modifier that gathers what the importance of weights is made of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from compressed_tensors.utils.match import match_named_modules

from calipers.errors import RecipeError
from calipers.planning.checks import Unmatched, available_modules, check_patterns
from calipers.planning.plan import StepPlan
from calipers.planning.specs import Requirement
from calipers.statistics.sums import SquareSums
from calipers.steps.base import Changes, Layer, Modifier, Patterns

_KEY = "imatrix"


class IMatrixGatherer(Modifier):
    """Sums the squares of the inputs of Linear modules during calibration.

    The sums stay on the modules as ``_imatrix_sum`` and ``_imatrix_count``, where a later
    ``imatrix_mse`` or ``optimal`` observer finds them.

    :param targets: names of modules, names of classes, or ``re:`` patterns
    :param ignore: the same, for what is left out
    :param unmatched: what happens if one of them matches nothing
    """

    targets: Patterns = ("Linear",)
    ignore: Patterns = ()
    unmatched: Unmatched = "error"

    def target_patterns(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the patterns of what is meant, and of what is not."""
        return self.targets, self.ignore

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:  # noqa: ARG002
        """Ask for the sums of every Linear module that is meant."""
        check_patterns(model, f"{self.label()}.targets", self.targets, self.unmatched)
        check_patterns(model, f"{self.label()}.ignore", self.ignore, self.unmatched)
        matched = match_named_modules(model, self.targets, self.ignore)
        found = [name for name, module in matched if isinstance(module, torch.nn.Linear)]
        if not found and self.unmatched == "error":
            raise RecipeError(
                f"{self.label()} finds no Linear module in {type(model).__name__}",
                hint=available_modules(model),
            )
        return StepPlan(measured=dict.fromkeys(found, (Requirement("input", _KEY, _sums),)))

    def solve(self, layer: Layer) -> Changes:
        """Leave the sums on the modules."""
        found = {name: layer.measurements.get(name, "input", _KEY) for name in layer.names}
        return Changes(
            published={name: sums.copied_fields() for name, sums in found.items() if sums}
        )


def _sums(name: str) -> SquareSums:
    sums = SquareSums()
    sums.owner = f"IMatrixGatherer (input of {name})"
    return sums
