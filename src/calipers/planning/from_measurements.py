"""What a plan asks for, read from measurements of the model instead of from data."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from calipers.errors import ConfigurationError, counted, shortened
from calipers.measurements import Measurements
from calipers.planning.plan import Plan
from calipers.planning.specs import IMPORTANCE, SENSITIVITY, ModuleSpec, Requirement


def derived_measurements(plan: Plan, known: Measurements) -> Measurements:
    """Return the statistics that a plan asks for; refuse a plan that asks for more than is known.

    :param known: what :func:`calipers.measure` has found of the same model
    """
    found, tensors = Measurements(known.info), known.tensors()
    missing: dict[_Lack, list[str]] = defaultdict(list)
    modules = {module.name: module for module in plan.modules}
    for name, requirements in plan.requirements(with_costs=True):
        for each in requirements:
            statistic, place = each.create(name), (name, each.base_name)
            if statistic.derive_from(tensors.get(place, {}).values()):
                optional = each.is_optional
                found.add(name, each.base_name, each.key, statistic, is_optional=optional)
            elif not each.is_optional:
                lack = _lack(each, modules.get(name), is_measured=place in tensors)
                missing[lack].append(".".join(place))
    for module in plan.modules:
        sensitivity = tensors.get((module.name, "weight"), {}).get(SENSITIVITY)
        if sensitivity is not None and sensitivity.num_tokens:
            found.add(module.name, "weight", SENSITIVITY, sensitivity, is_optional=True)
    for lack, names in missing.items():
        raise ConfigurationError(
            f"do not tell what {counted(len(names), 'tensor')} of the recipe "
            f"{'needs' if len(names) == 1 else 'need'} ({shortened(names, 3)}): {lack.problem}",
            subject="The measurements",
            hint=lack.remedy,
        )
    return found


class _Lack(NamedTuple):
    """Why something cannot be read from measurements, and what to do about it."""

    problem: str
    remedy: str

    @classmethod
    def of_collected(cls, problem: str, word: str) -> _Lack:
        """Return what is measured on request only."""
        return cls(problem, f"Measure again, with 'calipers measure … --collect {word}'")


_NOT_MEASURED = _Lack("they were not measured", "Measure this model again")
_NO_HESSIAN = _Lack.of_collected("how their channels go together (a Hessian)", "hessian")
_NO_OUTPUTS = _Lack.of_collected("outputs were not measured", "outputs")
_NO_STATES = _Lack.of_collected("queries, keys and values were not measured", "attention")
_NOT_QUANTIZED = _Lack(
    "inputs as they become when layers before are quantized",
    "Give the recipe 'error_propagation: float', or calibrate with data",
)
_ON_REQUEST = {"output": _NO_OUTPUTS, **dict.fromkeys(("q", "k", "v"), _NO_STATES)}


def _lack(requirement: Requirement, module: ModuleSpec | None, *, is_measured: bool) -> _Lack:
    """Say why a requirement cannot be met."""
    if not is_measured:
        return _ON_REQUEST.get(requirement.base_name, _NOT_MEASURED)
    weight = None if module is None else module.tensor("weight")
    if requirement.key == IMPORTANCE and weight is not None:
        return _NOT_QUANTIZED if weight.importance.uses_quantized_inputs else _NO_HESSIAN
    tensor = None if module is None else module.tensor(requirement.base_name)
    observer = "the observer" if tensor is None else f"observer {tensor.observer_with_options}"
    return _Lack(
        f"{observer} keeps something else than extrema and counts of values, such as an average "
        "that depends on the order of the data",
        "Choose static_minmax, histogram_mse, percentile or entropy, or calibrate with data",
    )
