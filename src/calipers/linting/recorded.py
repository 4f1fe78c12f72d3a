"""What was lost when a checkpoint was made, as the notes that Calipers writes beside it tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from calipers.checkpoint.description import costs_of
from calipers.checkpoint.folder_contents import NOTES
from calipers.errors import CalipersError
from calipers.files.json_files import read_json_object
from calipers.judging.costs import ActivationCost, costly
from calipers.linting.results import Finding


def check_recorded(folder: Path) -> Iterator[Finding]:
    """Find static activations that lose too much, by the costs that were recorded."""
    file = folder / NOTES
    if not file.is_file():
        return
    try:
        costs = costs_of(read_json_object(file).get("costs", {}), file)
    except CalipersError as error:
        problem = f"cannot be read: {error.context.what}"
        hint = "What static activations lose is not known; whoever loads the model does without."
        yield Finding("note", "notes-damaged", NOTES, problem, hint)
        return
    for (module, tensor), cost in costly(costs).items():
        yield _costly(f"{module}.{tensor}", cost)


def _costly(name: str, cost: ActivationCost) -> Finding:
    of_typical = cost.typical_error > cost.error
    whose = "of all but its largest values" if of_typical else "of its values"
    problem = (
        f"is static, and loses {cost.worst:.0%} {whose}: they reach {cost.largest:.4g}, and its "
        f"range ends at {cost.limit:.4g}"
    )
    hint = (
        "Quantize activations dynamically, leave the module out, or choose another observer; this "
        f"was found in the data of the calibration, and recorded in {NOTES}."
    )
    return Finding("warning", "activation-loss", name, problem, hint)
