"""Whether files hold the tensors of a model, and modules those that their schemes ask for."""

from __future__ import annotations

from collections.abc import Iterator

from calipers.checkpoint.auxiliary_files import NOTES
from calipers.checkpoint.quantized import QuantizedCheckpoint, recorded_costs
from calipers.checkpoint.stored_module import PARAMETERS, ExpectedTensor, StoredModule
from calipers.errors import CalipersError, listing
from calipers.judging.costs import costly
from calipers.kernels.rounding import IN_WORDS
from calipers.linting.check import Check, Finding
from calipers.numerics.layout import granularity_name, shared_columns, strategy_name

_AGAIN = "Quantize the model again, or correct the config."
_COPY = "Copy the file again, or write the checkpoint again."
_CONFIG = "Correct the quantization_config, or take the tensors that belong to it."


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


# Modules


class TensorsCheck(Check):
    """Look for tensors that are missing, unwanted, or of another shape or dtype."""

    def of_module(self, module: StoredModule) -> Iterator[Finding]:
        """Check a module of a checkpoint, quantized or not."""
        yield from check_quantized(module)
        yield from check_present(module)
        yield from check_fitting(module)
        yield from check_shapes(module)
        yield from check_unwanted(module)


def check_quantized(module: StoredModule) -> Iterator[Finding]:
    """Find modules that are quantized and should not be, and the other way round."""
    if module.weights is None and (module.stores_codes or "weight_scale" in module.tensors):
        problem = "is stored quantized, and the config ignores it or does not mean it"
        hint = "Readers take its codes for weights: correct 'ignore' and 'targets' of the config."
        yield Finding("error", "ignored-quantized", module.name, problem, hint)
    elif module.is_unquantized:
        problem = "is meant to be quantized by the config, and its weight is not"
        hint = "Add it to 'ignore' of the config, or quantize it."
        yield Finding("error", "not-quantized", module.name, problem, hint)


def check_present(module: StoredModule) -> Iterator[Finding]:
    """Find tensors that the scheme asks for and that are missing."""
    for kind, expected in module.defects:
        if kind == "missing" and expected.role == "codes":
            other = "weight" if expected.local == "weight_packed" else "weight_packed"
            if other not in module.tensors:
                problem = f"has no '{expected.local}', and other tensors of a quantized module"
                yield Finding("error", "weight-missing", module.name, problem, _AGAIN)
                continue
            assert module.form is not None
            stored, wanted = module.tensors[other].dtype, listing(map(_dtype, expected.dtypes))
            problem = (
                f"has '{other}' of {_dtype(stored)}, and the format '{module.form.value}' stores "
                f"'{expected.local}' of {wanted}"
            )
            yield Finding("error", "config-format", module.name, problem, _CONFIG)
        elif kind == "missing":
            problem = f"has no '{expected.local}', which its scheme asks for"
            if expected.side != "weight":
                problem += " (it is static: nothing is computed while the model runs)"
            of_states = expected.side in ("q", "k", "v")
            check = "kv-scale" if of_states else expected.role.replace("_", "-")
            yield Finding("error", f"{check}-missing", module.name, problem, _AGAIN)


def check_fitting(module: StoredModule) -> Iterator[Finding]:
    """Find tensors whose shape or dtype is another one than the scheme gives them."""
    width = module.indivisible_by
    for kind, expected in module.defects:
        if width is not None and expected.local in ("weight_scale", "weight_zero_point"):
            continue  # their shape is wrong in any case
        if kind == "dtype":
            wanted = " or ".join(map(_dtype, expected.dtypes[:3]))
            name, dtype = f"{module.name}.{expected.local}", module.tensors[expected.local].dtype
            problem = f"is {_dtype(dtype)}, and its scheme asks for {wanted}"
            yield Finding("error", "config-dtype", name, problem, _CONFIG)
        elif kind == "shape":
            yield _other_shape(module, expected)


def _other_shape(module: StoredModule, expected: ExpectedTensor) -> Finding:
    """Name the option of the scheme that is wrong, where a shape tells, or the shape."""
    name, stored = f"{module.name}.{expected.local}", module.tensors[expected.local].shape
    args, shape = module.weights, module.shape
    if args is not None and shape and stored and stored[:-1] == shape[:-1]:
        columns, last = shape[-1], stored[-1]
        if expected.role == "codes" and module.form in IN_WORDS:
            fitting = [bits for bits in range(1, 9) if -(-columns * bits // 32) == last]
            if len(fitting) == 1 and fitting[0] != args.num_bits:
                problem = f"has room for {fitting[0]} bits a value, and num_bits is {args.num_bits}"
                return Finding("error", "config-bits", name, problem, _CONFIG)
        of_rows = expected.local == "weight_scale" and strategy_name(args) in ("group", "channel")
        if of_rows and last and columns % last == 0:
            width = columns // last
            if width != (shared_columns(args) or columns):
                wanted = granularity_name(args)
                problem = f"has a scale for every {width} columns, and its scheme is '{wanted}'"
                return Finding("error", "config-group-size", name, problem, _CONFIG)
    role = {"codes": "packed", "order": "g-idx"}.get(expected.role, expected.role)
    problem = f"has the shape {stored}, and {expected.shape} fits the weight and its scheme"
    return Finding("error", f"shape-{role.replace('_', '-')}", name, problem, _AGAIN)


def check_shapes(module: StoredModule) -> Iterator[Finding]:
    """Find a ``weight_shape`` that is not the shape of the weight, and groups that fill no row."""
    if module.is_unquantized:
        return
    if module.contradicts_noted_shape:
        problem = f"holds {module.noted_shape}, and the weight has the shape {module.model_shape}"
        if module.noted_shape is None:
            problem = "does not hold the shape of a weight"
        yield Finding("error", "shape-weight", f"{module.name}.weight_shape", problem, _AGAIN)
    width, shape = module.indivisible_by, module.shape
    if width is not None and shape is not None:
        problem = f"has a group_size of {width}, which does not divide its {shape[-1]} columns"
        yield Finding("error", "config-group-size", module.name, problem, _CONFIG)


def check_unwanted(module: StoredModule) -> Iterator[Finding]:
    """Find parameters of quantization that the config does not ask for."""
    if module.weights is None and module.stores_codes:
        return  # which is said of the whole module
    wanted = {each.local for each in module.expected} | module.elsewhere
    for local in module.tensors:
        if local not in PARAMETERS or local in wanted:
            continue
        if module.weights is None and local == "weight_scale":
            continue  # so is this
        if any(local == f"{side}_zero_point" and args.symmetric for side, args in module.sides):
            continue  # which is judged by its values
        problem = "is stored, and the config does not ask for it"
        hint = "vLLM refuses unknown parameters: remove it, or correct the config."
        yield Finding("warning", "tensor-unwanted", f"{module.name}.{local}", problem, hint)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
