"""Plans that measure for whoever quantizes later, and plans that are fed from such measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers.errors import ConfigurationError, counted, not_allowed, shortened
from calipers.measurements import Measurements
from calipers.measurements.tensors import STATISTICS
from calipers.numerics.library_versions import is_cached_attention_module
from calipers.planning.checks import available_modules
from calipers.planning.plan import Plan
from calipers.planning.specs import (
    COUNTS,
    IMPORTANCE,
    SENSITIVITY,
    SQUARES,
    ModuleSpec,
    Requirement,
)
from calipers.statistics.base import Statistic
from calipers.statistics.ranges import Extrema
from calipers.statistics.sums import BlockHessians, Sensitivity, SquareSums
from calipers.statistics.value_counts import ValueCounts

COLLECTED = ("hessian", "outputs", "attention", "sensitivity")
"""What is collected on request, beside what is known of the input of every Linear module; and so
are, of these inputs, the statistics that packages bring, by their names."""

EXTREMA = "extrema"
CHANNEL_EXTREMA = "channel_extrema"
HESSIAN = "hessian"
HEAD_COUNTS = "head_counts"
HEAD_EXTREMA = "head_extrema"

_TENSOR = QuantizationArgs(num_bits=8, strategy="tensor")
_CHANNEL = QuantizationArgs(num_bits=8, strategy="group", group_size=1)
_HEAD = QuantizationArgs(num_bits=8, strategy="attn_head")


def check_collected(collect: str | Collection[str]) -> tuple[str, ...]:
    """Return what is to be collected, in a fixed order; refuse what cannot be.

    >>> check_collected("outputs,hessian")
    ('hessian', 'outputs')
    """
    words = collect.split(",") if isinstance(collect, str) else collect
    names = {str(word).strip() for word in words} - {""}
    known = (*COLLECTED, *STATISTICS.added())
    for name in sorted(names - set(known)):
        raise not_allowed("collect", name, known)
    return tuple(name for name in known if name in names)


def collecting_plan(model: torch.nn.Module, collect: Collection[str] = ()) -> Plan:
    """Ask for statistics of the input of every Linear module, and for what is on request."""
    measured: dict[str, tuple[Requirement, ...]] = {}
    for name, module in model.named_modules():
        wanted: list[Requirement] = []
        if isinstance(module, torch.nn.Linear):
            of_channels = partial(Extrema, "input", _CHANNEL)
            wanted += _of_values("input")
            wanted.append(_required("input", CHANNEL_EXTREMA, of_channels, in_folds=True))
            wanted.append(_required("input", SQUARES, SquareSums, in_folds=True))
            if "hessian" in collect:
                hessian = partial(BlockHessians, module.in_features)
                wanted.append(_required("input", HESSIAN, hessian, in_folds=True))
            for key in collect:
                if key not in COLLECTED:
                    create = partial(STATISTICS.get(key).from_configuration, {})
                    wanted.append(_required("input", key, create))
            if "outputs" in collect:
                wanted += _of_values("output")
            if "sensitivity" in collect:
                wanted.append(_required("weight", SENSITIVITY, Sensitivity))
        elif "attention" in collect and is_cached_attention_module(module):
            for base_name in ("q", "k", "v"):
                counts = partial(ValueCounts, base_name, "attn_head")
                extrema = partial(Extrema, base_name, _HEAD)
                wanted += _of_values(base_name)
                wanted.append(_required(base_name, HEAD_COUNTS, counts))
                wanted.append(_required(base_name, HEAD_EXTREMA, extrema))
        if wanted:
            measured[name] = tuple(wanted)
    if not measured:
        problem = f"{type(model).__name__} has no Linear module to measure"
        raise ConfigurationError(problem, hint=available_modules(model))
    return Plan(measured=measured)


def _of_values(base_name: str) -> list[Requirement]:
    counts, extrema = partial(ValueCounts, base_name), partial(Extrema, base_name, _TENSOR)
    return [
        _required(base_name, COUNTS, counts, in_folds=True),
        _required(base_name, EXTREMA, extrema, in_folds=True),
    ]


def _required(
    base_name: str, key: str, make: Callable[[], Statistic], *, in_folds: bool = False
) -> Requirement:
    def create(name: str) -> Statistic:
        statistic = make()
        statistic.owner = f"{base_name} of {name}"
        return statistic

    return Requirement(base_name, key, create, in_folds=in_folds)


def derived_measurements(plan: Plan, known: Measurements) -> Measurements:
    """Return the statistics that a plan asks for; refuse a plan that asks for more than is known.

    :param known: what :func:`calipers.measure` has found of the same model
    """
    found, before = Measurements(known.info), known.tensors()
    affected = plan.affected
    tensors = {place: _lasting(each, affected.get(place)) for place, each in before.items()}
    missing: dict[tuple[str, str], list[str]] = defaultdict(list)
    modules = {module.name: module for module in plan.modules}
    for name, requirements in plan.requirements(with_costs=True):
        for each in requirements:
            statistic, place = each.create(name), (name, each.base_name)
            if statistic.derive_from(tensors.get(place, {}).values()):
                optional = each.is_optional
                found.add(name, each.base_name, each.key, statistic, is_optional=optional)
                if each.in_folds:
                    _add_folds(found, (name, each), known)
            elif not each.is_optional:
                why = _why_missing(each, modules.get(name), is_measured=place in tensors)
                missing[_CHANGED if place in affected else why].append(".".join(place))
    for module in plan.modules:
        sensitivity = tensors.get((module.name, "weight"), {}).get(SENSITIVITY)
        if sensitivity is not None and sensitivity.num_tokens:
            found.add(module.name, "weight", SENSITIVITY, sensitivity, is_optional=True)
    for name, requirements in plan.measured_before.items():
        for each in requirements:
            statistic, place = each.create(name), (name, each.base_name)
            if statistic.derive_from(before.get(place, {}).values()):
                found.add(name, each.base_name, each.key, statistic, is_optional=True)
            else:
                missing[_NO_HESSIAN].append(".".join(place))
    for place in affected:  # what is known of it afterwards is worked out from these
        for key, statistic in tensors.get(place, {}).items():
            found.add(*place, f"{_BEFORE} {key}", statistic, is_optional=True)
    for (problem, remedy), names in missing.items():
        raise ConfigurationError(
            f"do not tell what {counted(len(names), 'tensor')} of the recipe "
            f"{'needs' if len(names) == 1 else 'need'} ({shortened(names, 3)}): {problem}",
            subject="The measurements",
            hint=remedy,
        )
    return found


def _add_folds(found: Measurements, wanted: tuple[str, Requirement], known: Measurements) -> None:
    """Add what is kept of the folds of the data, all but the last; nothing if one is lacking."""
    name, each = wanted
    folds = []
    for prefix, of_fold in known.kept_folds(name, each.base_name):
        statistic = each.create(name)
        if not statistic.derive_from(of_fold):
            break
        folds.append((prefix + each.key, statistic))
    for key, statistic in folds[: known.num_folds - 1]:
        found.add(name, each.base_name, key, statistic, is_optional=True)


def _lasting(statistics: Mapping[str, Statistic], exact: bool | None) -> dict[str, Statistic]:
    """Return what is still known of a tensor when a transform has changed it.

    :param exact: whether each of its channels is divided by a factor; None: nothing changes it
    """
    if exact is None:
        return dict(statistics)
    return {key: each for key, each in statistics.items() if exact and each.can_be_divided}


def derive_again(plan: Plan, names: Collection[str], measurements: Measurements) -> None:
    """Work out what a plan asks for of modules from what is known of them after a transform."""
    for name, requirements in plan.requirements(with_costs=True):
        for each in requirements if name in names else ():
            place = name, each.base_name
            if place not in plan.affected:
                continue
            statistic = each.create(name)
            if statistic.derive_from(measurements.tensors().get(place, {}).values()):
                measurements.replace(*place, each.key, statistic)


_BEFORE = "before"
_REQUEST = "Measure again, with 'calipers measure … --collect {}'"
_NO_HESSIAN = "how their channels go together (a Hessian)", _REQUEST.format("hessian")
_CHANGED = (
    "a transform changes them, and what was counted over all channels, or of outputs and states, "
    "does not follow it",
    "Calibrate with data, or choose static_minmax, which the extrema of channels tell",
)
_NO_STATES = ("queries, keys and values were not measured", _REQUEST.format("attention"))
_NOT_MEASURED = {
    "output": ("outputs were not measured", _REQUEST.format("outputs")),
    **dict.fromkeys(("q", "k", "v"), _NO_STATES),
}


def _why_missing(
    requirement: Requirement, module: ModuleSpec | None, *, is_measured: bool
) -> tuple[str, str]:
    """Say why measurements do not meet a requirement, and what to do about it."""
    if not is_measured:
        usual = ("they were not measured", "Measure this model again")
        return _NOT_MEASURED.get(requirement.base_name, usual)
    weight = None if module is None else module.tensor("weight")
    if requirement.key == IMPORTANCE and weight is not None:
        if weight.importance.uses_quantized_inputs:
            return (
                "inputs as they become when layers before are quantized",
                "Give the recipe 'error_propagation: float', or calibrate with data",
            )
        return _NO_HESSIAN
    tensor = None if module is None else module.tensor(requirement.base_name)
    observer = "the observer" if tensor is None else f"observer {tensor.observer_with_options}"
    return (
        f"{observer} keeps something else than extrema and counts of values, such as an average "
        "that depends on the order of the data",
        "Choose static_minmax, histogram_mse, percentile or entropy, or calibrate with data",
    )
