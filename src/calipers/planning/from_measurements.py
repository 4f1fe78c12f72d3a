"""What a plan asks for, read from measurements of the model instead of from data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from calipers.errors import ConfigurationError, Text, Words, counted, shortened
from calipers.measurements import Measurements
from calipers.measurements.tensors import Place, Statistics
from calipers.planning.plan import Plan
from calipers.planning.specs import IMPORTANCE, ModuleSpec, Requirement

_COLLECTED_BY = {"output": "outputs", "q": "attention", "k": "attention", "v": "attention"}
_NOTHING: Statistics = {}


def derived_measurements(plan: Plan, known: Measurements) -> Measurements:
    """Return the statistics that a plan asks for; refuse a plan that asks for more than is known.

    :param known: what :func:`calipers.measure` has found of the same model
    """
    found, tensors = Measurements(known.info), known.tensors()
    missing: dict[str, list[str]] = {}
    specs = {module.name: module for module in plan.modules}
    for name, requirements in plan.requirements(with_costs=True):
        for each in requirements:
            statistic, place = each.create(name), (name, each.base_name)
            if statistic.derive_from(tensors.get(place, _NOTHING).values()):
                optional = each.is_optional
                found.add(name, each.base_name, each.key, statistic, is_optional=optional)
            elif not each.is_optional:
                reason = _reason(each, specs.get(name), place in tensors)
                missing.setdefault(reason, []).append(".".join(place))
    if missing:
        raise _missing(missing, tensors)
    return found


_NOT_MEASURED = "not measured"
_PAIRED = "inputs as they become when layers before are quantized"
_HESSIAN = "hessian"


def _reason(requirement: Requirement, module: ModuleSpec | None, is_known: bool) -> str:
    """Return what is missing: a word of ``collect``, or what no measurements can have."""
    weight = None if module is None else module.tensor("weight")
    if requirement.key == IMPORTANCE and weight is not None:
        if weight.importance.name == "paired_hessian":
            return _PAIRED
        return _HESSIAN if is_known else _NOT_MEASURED
    if not is_known:
        return _COLLECTED_BY.get(requirement.base_name, _NOT_MEASURED)
    tensor = None if module is None else module.tensor(requirement.base_name)
    return f"observer {'' if tensor is None else tensor.observer_with_options}"


def _missing(
    missing: Mapping[str, Iterable[str]], tensors: Mapping[Place, Statistics]
) -> ConfigurationError:
    reason, names = next((reason, list(names)) for reason, names in missing.items())
    return ConfigurationError(
        f"do not tell what {counted(len(names), 'tensor')} of the recipe "
        f"{'needs' if len(names) == 1 else 'need'} ({shortened(names, 3)}): {_told(reason)}",
        subject="The measurements",
        hint=_remedy(reason, any(tensors)),
    )


def _told(reason: str) -> str:
    if reason.startswith("observer "):
        return (
            f"{reason} keeps something else than extrema and counts of values, such as an average "
            "that depends on the order of the data"
        )
    told = {
        _NOT_MEASURED: "they were not measured",
        _HESSIAN: "how their channels go together (a Hessian)",
        _PAIRED: _PAIRED,
        "outputs": "outputs were not measured",
        "attention": "queries, keys and values were not measured",
    }
    return told[reason]


def _remedy(reason: str, has_any: bool) -> Words:
    if reason == _PAIRED:
        return "Give the recipe 'error_propagation: float', or calibrate with data"
    if reason.startswith("observer "):
        return "Choose static_minmax, histogram_mse, percentile or entropy, or calibrate with data"
    if reason == _NOT_MEASURED:
        return Text("Measure this model again" if has_any else "Measure the model")
    return f"Measure again, with 'calipers measure … --collect {reason}'"
