"""What was recorded with a checkpoint of what its modules lose."""

from __future__ import annotations

import math

from calipers.checkpoint.folder_contents import NOTES
from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.errors import damaged_file
from calipers.judging.costs import ModuleCosts


def is_error(found: object) -> bool:
    """Whether it is a finite number that is not negative."""
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return is_number and math.isfinite(found) and found >= 0  # type: ignore[arg-type, operator]


def recorded_costs(checkpoint: QuantizedCheckpoint) -> dict[str, ModuleCosts]:
    """Return the costs of modules that were recorded with a checkpoint; refuse damaged ones."""
    file, found = checkpoint.folder / NOTES, checkpoint.notes.get("costs", {})
    if not isinstance(found, dict):
        raise damaged_file(file, "'costs' must be an object")
    try:
        costs = {name: ModuleCosts.from_dict(each) for name, each in found.items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise damaged_file(file, f"'costs' are not those of modules ({error})") from error
    for name, cost in costs.items():
        shares = (cost.weight, cost.input, cost.typical_input)
        figures = [share for share in shares if share is not None]
        figures += [
            value
            for tensor in cost.tensors.values()
            for value in vars(tensor).values()
            if not isinstance(value, bool)
        ]
        if not all(map(is_error, figures)):
            raise damaged_file(file, f"the costs of '{name}' are no finite numbers")
    return costs
