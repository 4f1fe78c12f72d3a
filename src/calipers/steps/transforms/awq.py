"""The modifier that scales channels up which weights are to keep more of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from calipers.errors import RecipeError
from calipers.numerics.layout import strategy_name
from calipers.numerics.qparams import fake_quantize
from calipers.planning.plan import Plan
from calipers.planning.specs import ModuleSpec, Requirement, TensorSpec
from calipers.solvers.equalization import (
    awq_factors,
    mean_magnitudes,
    output_energy,
    storable_factors,
    strengths,
)
from calipers.solvers.importance import HessianImportance
from calipers.statistics.base import Statistic
from calipers.statistics.sums import BlockHessians, SquareSums
from calipers.steps.base import Layer, Modifier
from calipers.steps.quantization import QuantizationModifier, fused_groups, solve_group
from calipers.steps.transforms.folding import ChosenFold, EqualizingModifier, FoldMapping

_KEY = "awq"
_PASSED_OVER = ("offload_device", "requires_calibration_data")


class AWQMapping(FoldMapping):
    """A source and its readers, as recipes of AWQ have it."""

    def to_data(self) -> Any:
        """Return the mapping as plain data."""
        return {"smooth_layer": self.smooth_layer, "balance_layers": list(self.balance_layers)}


class AWQModifier(EqualizingModifier):
    """Scales channels by how large they are, as strongly as weights then lose least (AWQ).

    Of a grid of strengths the one is taken with which the outputs lose least when the weights are
    quantized as the recipe says, by their own observer. That is worked out from sums over the data,
    which are gathered once.

    :param mappings: sources with the modules that read them
    :param duo_scaling: whether the magnitudes of weights count, too; ``both`` tries either
    :param n_grid: how many strengths are tried
    """

    mappings: Annotated[tuple[AWQMapping, ...] | None, BeforeValidator(AWQMapping.read)] = None
    duo_scaling: bool | Literal["both"] = True
    n_grid: Annotated[int, Field(ge=2)] = 20

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> list[Modifier]:
        """Make the modifier; an entry that quantizes as well, as they once did, becomes two."""
        if not given.keys() & {"scheme", "config_groups"}:
            return [cls(**given)]
        own = {"mappings", "duo_scaling", "n_grid", "offload_device"}
        rest = {key: value for key, value in given.items() if key not in own}
        quantization = QuantizationModifier(**rest)
        return [cls(**{key: given[key] for key in own & given.keys()}), quantization]

    @model_validator(mode="before")
    @classmethod
    def _pass_over(cls, given: Any) -> Any:
        """Pass over keys of llm-compressor that change nothing here."""
        return {key: value for key, value in given.items() if key not in _PASSED_OVER}

    def plan_transform(self, model: torch.nn.Module, plan: Plan, step: str) -> Any:
        """Find the channels that are meant: those that a quantized weight reads."""
        quantized = {each.name: each.tensor("weight") for each in plan.modules}
        planned = super().plan_transform(model, plan, step)
        if planned is None:
            return None
        readers = {name for each in planned.folds for name in each.readers}
        weights = {name: spec for name in readers if (spec := quantized.get(name)) is not None}
        if not weights:
            raise RecipeError(
                f"{self.label()} finds no quantized weight for whose sake channels are scaled",
                hint="Put it beside a modifier that quantizes them, such as QuantizationModifier",
            )
        whole = sorted(n for n, spec in weights.items() if strategy_name(spec.args) == "tensor")
        if self.duo_scaling is not False and whole:
            raise RecipeError(
                f"is {str(self.duo_scaling).lower()}, but '{whole[0]}' has one scale for the whole "
                "weight, by which magnitudes of columns cannot be told",
                subject=f"{self.label()}.duo_scaling",
                hint="Set it to false, or quantize weights per channel or group",
                path=("duo_scaling",),
            )
        return planned

    def requirements(self, reader: str, plan: Plan) -> tuple[Requirement, ...]:
        """Ask for Σx², or for Σ x xᵀ in blocks where the observer of the weight needs that."""
        module = next((each for each in plan.modules if each.name == reader), None)
        spec = None if module is None else module.tensor("weight")
        if module is None or spec is None:
            return ()
        create = partial(_sums, module.columns, spec, self.label())
        return (Requirement("input", _KEY, create),)

    def factors(self, layer: Layer, chosen: ChosenFold) -> tuple[Tensor, dict[str, Any]] | None:
        """Return the factors with which quantized weights lose least; None: no data reached it."""
        modules = [each for each in layer.modules if each.name in chosen.readers]
        seen = {each: layer.measurements.get(each.name, "input", _KEY) for each in modules}
        known = {each: sums for each, sums in seen.items() if sums is not None and sums.num_tokens}
        if not known:
            return None
        fold = chosen.fold
        weights = {each: layer.weight(each.name).detach() for each in known}
        activations = _magnitudes(chosen, known.values())
        pairs = [(weight, _spec(each).args) for each, weight in weights.items()]
        columns = fold.by_channel(mean_magnitudes(pairs, len(_squares(next(iter(known.values()))))))
        best, lowest, unscaled = torch.ones(fold.channels), math.inf, math.inf
        told: dict[str, Any] = {}
        for strength in strengths(self.n_grid, self.duo_scaling):
            layer.ranks.check()
            factors = awq_factors(activations, columns.mean(1), strength)
            if fold.kind == "norm":
                weight = layer.weight(fold.source).detach()
                factors = storable_factors(weight, factors, fold.offset)[1].cpu()
            lost = _lost(layer, weights, known, fold.expanded(factors))
            if not strength.uses_weights and strength.ratio == 0:
                unscaled = lost
            if lost < lowest:
                best, lowest = factors, lost
                told = {"strength": strength.ratio, "duo_scaling": strength.uses_weights}
        gain = {"loss": lowest / unscaled} if 0 < unscaled < math.inf else {}
        return best, {**told, **gain}


def _spec(module: ModuleSpec) -> TensorSpec:
    spec = module.tensor("weight")
    assert spec is not None
    return spec


def _sums(columns: int | None, spec: TensorSpec, label: str, name: str) -> Statistic:
    assert spec.observer is not None
    statistic: Statistic | None = SquareSums()
    if isinstance(spec.observer.importance, HessianImportance):
        statistic = spec.observer.importance.statistic(columns, spec.args)
    assert statistic is not None
    statistic.owner = f"{label} (input of {name})"
    return statistic


def _squares(sums: Statistic) -> Tensor:
    """Return Σx² of each channel."""
    if isinstance(sums, SquareSums):
        return sums._imatrix_sum.cpu()
    assert isinstance(sums, BlockHessians)
    return sums.hessians.diagonal(dim1=1, dim2=2).flatten().cpu()


def _magnitudes(chosen: ChosenFold, seen: Any) -> Tensor:
    """Return √E[x²] of each channel, over all tokens of all that read it."""
    squares = torch.stack([_squares(sums) for sums in seen]).sum(0)
    mean = squares / sum(sums.num_tokens for sums in seen)
    return chosen.fold.by_channel(mean).mean(1).sqrt()


def _lost(
    layer: Layer,
    weights: Mapping[ModuleSpec, Tensor],
    seen: Mapping[ModuleSpec, Statistic],
    factors: Tensor,
) -> float:
    """Return what the outputs of modules lose when their columns are multiplied and quantized."""
    total = 0.0
    scaled, inputs = dict[ModuleSpec, Tensor](), dict[ModuleSpec, Statistic | None]()
    for module, weight in weights.items():
        wide = torch.promote_types(weight.dtype, torch.float32)
        scaled[module] = (weight.to(wide) * factors.to(weight.device, wide)).to(weight.dtype)
        inputs[module] = seen[module].divided_by(factors)
    for group in fused_groups(list(weights)):
        qparams = solve_group(
            layer, {each: scaled[each] for each in group}, {each: inputs[each] for each in group}
        )
        for module in group:
            args = _spec(module).args
            quantized = fake_quantize(
                scaled[module], args=args, **qparams[module.name, "weight"]
            ).float()
            error = quantized / factors.to(quantized) - weights[module].float()
            sums = seen[module]
            total += output_energy(
                error, sums.hessians if isinstance(sums, BlockHessians) else _squares(sums)
            )
    return total
