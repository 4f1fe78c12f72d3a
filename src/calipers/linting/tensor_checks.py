"""Whether a module has the tensors that its scheme asks for, in the right shapes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from calipers.errors import listing
from calipers.files.safetensors_header import StoredTensor
from calipers.kernels.packing import IN_WORDS
from calipers.linting.expected import PARAMETERS, Expected, expected_tensors
from calipers.linting.modules import ModelNames, StoredModule
from calipers.linting.results import Finding
from calipers.numerics.layout import (
    granularity_name,
    indivisible_by,
    shared_columns,
    strategy_name,
)

_AGAIN = "Quantize the model again, or correct the config."
_CONFIG = "Correct the quantization_config, or take the tensors that belong to it."
_STATES = {"k": "k_proj", "v": "v_proj", "q": "q_proj"}


def check_quantized(module: StoredModule) -> Iterator[Finding]:
    """Find modules that are quantized and should not be, and the other way round."""
    if module.weights is None and (module.stores_codes or "weight_scale" in module.tensors):
        problem = "is stored quantized, and the config ignores it or does not mean it"
        hint = "Readers take its codes for weights: correct 'ignore' and 'targets' of the config."
        yield Finding("error", "ignored-quantized", module.name, problem, hint)
    elif _is_left_alone(module):
        problem = "is meant to be quantized by the config, and its weight is not"
        hint = "Add it to 'ignore' of the config, or quantize it."
        yield Finding("error", "not-quantized", module.name, problem, hint)


def _is_left_alone(module: StoredModule) -> bool:
    plain = "weight" in module.tensors and not module.stores_codes
    return module.weights is not None and plain and "weight_scale" not in module.tensors


def is_sound(module: StoredModule) -> bool:
    """Whether the tensors of a quantized weight are there, and fit each other."""
    if module.weights is None or _is_left_alone(module):
        return False
    if any(True for check in (_noted_shape, _indivisible) for _ in check(module)):
        return False
    for each in expected_tensors(module):
        stored = module.tensors.get(each.local)
        if each.side != "weight" or (stored is None and not each.required):
            continue
        if stored is None or stored.dtype not in each.dtypes or each.shape is None:
            return False
        if not _fits(stored.shape, each.shape):
            return False
    return True


def check_present(module: StoredModule) -> Iterator[Finding]:
    """Find tensors that the scheme asks for and that are missing."""
    if _is_left_alone(module):
        return
    for each in expected_tensors(module):
        if each.local in module.tensors or not each.required:
            continue
        if each.role == "codes":
            yield _without_codes(module, each)
        elif each.local not in module.elsewhere:
            yield _missing(module, each)


def _without_codes(module: StoredModule, each: Expected) -> Finding:
    assert module.form is not None
    other = "weight" if each.local == "weight_packed" else "weight_packed"
    if other in module.tensors:
        found = module.tensors[other].dtype
        problem = (
            f"has '{other}' of {_dtype(found)}, and the format '{module.form.value}' stores "
            f"'{each.local}' of {listing(map(_dtype, each.dtypes))}"
        )
        return Finding("error", "config-format", module.name, problem, _CONFIG)
    problem = f"has no '{each.local}', and other tensors of a quantized module"
    return Finding("error", "weight-missing", module.name, problem, _AGAIN)


def _missing(module: StoredModule, each: Expected) -> Finding:
    check = f"{each.role.replace('_', '-')}-missing"
    if each.side in _STATES:
        check = "kv-scale-missing"
    problem = f"has no '{each.local}', which its scheme asks for"
    if each.side != "weight":
        problem += " (it is static: nothing is computed while the model runs)"
    return Finding("error", check, module.name, problem, _AGAIN)


def check_fitting(module: StoredModule) -> Iterator[Finding]:
    """Find tensors whose shape or dtype is another one than the scheme gives them."""
    if _is_left_alone(module):
        return
    indivisible = list(_indivisible(module))
    for each in expected_tensors(module):
        stored = module.tensors.get(each.local)
        if stored is None or (indivisible and each.local in ("weight_scale", "weight_zero_point")):
            continue
        if stored.dtype not in each.dtypes:
            yield _other_dtype(module, each, stored)
        elif each.shape is not None and not _fits(stored.shape, each.shape):
            yield _other_shape(module, each, stored)
    yield from _noted_shape(module)
    yield from indivisible


def _indivisible(module: StoredModule) -> Iterator[Finding]:
    """Find groups that do not fill a row; blocks may reach beyond it."""
    args, shape = module.weights, module.shape
    if args is None or shape is None or strategy_name(args) not in ("group", "tensor_group"):
        return
    width = indivisible_by(shape[-1], args)
    if width is not None:
        problem = f"has a group_size of {width}, which does not divide its {shape[-1]} columns"
        yield Finding("error", "config-group-size", module.name, problem, _CONFIG)


def _fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether shapes are the same; a single number may have any number of dimensions."""
    return found == wanted or math.prod(found) == math.prod(wanted) == 1


def _other_dtype(module: StoredModule, each: Expected, stored: StoredTensor) -> Finding:
    wanted = " or ".join(map(_dtype, each.dtypes[:3]))
    problem = f"is {_dtype(stored.dtype)}, and its scheme asks for {wanted}"
    return Finding("error", "config-dtype", f"{module.name}.{each.local}", problem, _CONFIG)


def _other_shape(module: StoredModule, each: Expected, stored: StoredTensor) -> Finding:
    name = f"{module.name}.{each.local}"
    assert each.shape is not None
    if each.role == "codes":
        bits = _bits_that_fit(module, stored)
        if bits is not None:
            assert module.weights is not None
            problem = f"has room for {bits} bits a value, and num_bits is {module.weights.num_bits}"
            return Finding("error", "config-bits", name, problem, _CONFIG)
    if each.local == "weight_scale":
        size = _group_that_fits(module, stored)
        if size is not None:
            assert module.weights is not None
            wanted = granularity_name(module.weights)
            problem = f"has a scale for every {size} columns, and its scheme is '{wanted}'"
            return Finding("error", "config-group-size", name, problem, _CONFIG)
    role = {"codes": "packed", "order": "g-idx"}.get(each.role, each.role.replace("_", "-"))
    problem = f"has the shape {stored.shape}, and {each.shape} fits the weight and its scheme"
    return Finding("error", f"shape-{role}", name, problem, _AGAIN)


def _bits_that_fit(module: StoredModule, stored: StoredTensor) -> int | None:
    if module.form not in IN_WORDS or module.shape is None or module.weights is None:
        return None
    if stored.shape[:-1] != module.shape[:-1]:
        return None
    found = [b for b in range(1, 9) if -(-module.shape[-1] * b // 32) == stored.shape[-1]]
    return found[0] if len(found) == 1 and found[0] != module.weights.num_bits else None


def _group_that_fits(module: StoredModule, stored: StoredTensor) -> int | None:
    args = module.weights
    if args is None or module.shape is None or strategy_name(args) not in ("group", "channel"):
        return None
    *rows, columns = module.shape
    groups = stored.shape[-1] if stored.shape else 0
    if list(stored.shape[:-1]) != rows or not groups or columns % groups:
        return None
    found = columns // groups
    return found if found != (shared_columns(args) or columns) else None


def _noted_shape(module: StoredModule) -> Iterator[Finding]:
    if module.form not in IN_WORDS or "weight_shape" not in module.tensors:
        return
    noted = module.noted_shape()
    if noted is None or (module.model_shape is not None and noted != module.model_shape):
        name, shape = f"{module.name}.weight_shape", module.model_shape
        problem = f"holds {noted}, and the weight has the shape {shape}"
        if noted is None:
            problem = "does not hold the shape of a weight"
        yield Finding("error", "shape-weight", name, problem, _AGAIN)


def check_unwanted(module: StoredModule) -> Iterator[Finding]:
    """Find parameters of quantization that the config does not ask for."""
    if module.weights is None and module.stores_codes:
        return  # which is said of the whole module
    wanted = {each.local for each in expected_tensors(module)} | module.elsewhere
    for local in module.tensors:
        if local not in PARAMETERS or local in wanted or _belongs_to_symmetric(module, local):
            continue
        if module.weights is None and local == "weight_scale":
            continue
        problem = "is stored, and the config does not ask for it"
        hint = "vLLM refuses unknown parameters: remove it, or correct the config."
        yield Finding("warning", "tensor-unwanted", f"{module.name}.{local}", problem, hint)


def _belongs_to_symmetric(module: StoredModule, local: str) -> bool:
    """Whether it is a zero point of something that is symmetric, which is judged by its values."""
    return any(local == f"{side}_zero_point" and args.symmetric for side, args in module.sides)


def check_weights_of_model(model: ModelNames, modules: list[StoredModule]) -> Iterator[Finding]:
    """Find parameters of the model that no file holds, or that have another shape there."""
    stored = {f"{m.name}.{local}".lstrip("."): t for m in modules for local, t in m.tensors.items()}
    quantized = {m.name for m in modules if m.stores_codes or PARAMETERS & set(m.tensors)}
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


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
