"""Whether the files of a checkpoint hold the tensors of its model, and can be read."""

from __future__ import annotations

from collections.abc import Iterator

from calipers.checkpoint.auxiliary_files import NOTES
from calipers.checkpoint.quantized import QuantizedCheckpoint, recorded_costs
from calipers.checkpoint.stored_module import PARAMETERS
from calipers.errors import CalipersError
from calipers.judging.costs import costly
from calipers.linting.check import Check
from calipers.linting.results import Finding

_COPY = "Copy the file again, or write the checkpoint again."
_AGAIN = "Quantize the model again, or correct the config."


class FilesCheck(Check):
    """Look at the index of the files, the parameters of the model and what was recorded of it."""

    def of_checkpoint(self, checkpoint: QuantizedCheckpoint) -> Iterator[Finding]:
        """Check a checkpoint as a whole."""
        if checkpoint.model.problem:
            problem = f"does not let transformers build its model: {checkpoint.model.problem}"
            hint = (
                "Modules are known by their names alone; what targets mean by class may be wrong."
            )
            yield Finding("note", "model-unknown", "config.json", problem, hint)
        for kind, name, problem in checkpoint.index_defects:
            is_outside = kind == "outside"
            hint = "Do not load this checkpoint before its index has been corrected."
            yield Finding("error", f"index-{kind}", name, problem, hint if is_outside else _COPY)
        yield from check_weights_of_model(checkpoint)
        yield from check_recorded_costs(checkpoint)


def check_weights_of_model(checkpoint: QuantizedCheckpoint) -> Iterator[Finding]:
    """Find parameters of the model that no file holds, or that have another shape there."""
    model, stored = checkpoint.model, checkpoint.tensors
    quantized = {
        name
        for name, module in checkpoint.modules.items()
        if module.stores_codes or PARAMETERS & set(module.tensors)
    }
    for name, shape in model.shapes.items():
        module, _, local = name.rpartition(".")
        if local == "weight" and module in quantized:
            continue  # its codes are judged by the scheme
        if name not in stored:
            if name not in model.tied:
                problem = "is a parameter of the model, and no file holds it"
                yield Finding("error", "weight-missing", name, problem, _AGAIN)
        elif stored[name].shape != shape:
            problem = f"has the shape {stored[name].shape}, and the model has {shape}"
            yield Finding("error", "shape-weight", name, problem, _AGAIN)


def check_recorded_costs(checkpoint: QuantizedCheckpoint) -> Iterator[Finding]:
    """Find static activations that lose too much, by the costs that were recorded."""
    try:
        costs = recorded_costs(checkpoint)
    except CalipersError as error:
        problem = f"cannot be read: {error.context.what}"
        hint = "What static activations lose is not known; whoever loads the model does without."
        yield Finding("note", "notes-damaged", NOTES, problem, hint)
        return
    for (module, tensor), cost in costly(costs).items():
        of_typical = cost.typical_error > cost.error
        whose = "of all but its largest values" if of_typical else "of its values"
        problem = (
            f"is static, and loses {cost.worst:.0%} {whose}: they reach {cost.largest:.4g}, and "
            f"its range ends at {cost.limit:.4g}"
        )
        hint = (
            "Quantize activations dynamically, leave the module out, or choose another observer; "
            f"this was found in the data of the calibration, and recorded in {NOTES}."
        )
        yield Finding("warning", "activation-loss", f"{module}.{tensor}", problem, hint)
