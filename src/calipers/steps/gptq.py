"""The modifier that rounds weights with error feedback."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from calipers.errors import RecipeError
from calipers.kernels.hessian import Rounding
from calipers.numerics.formats import FP8_DTYPE, Format, storable_scales
from calipers.numerics.layout import Layout
from calipers.observers import QParamsDict
from calipers.planning.plan import Propagation, StepPlan
from calipers.planning.specs import IMPORTANCE, ModuleSpec, TensorSpec
from calipers.solvers.gptq import Curvature, CurvatureCache, Scales, corrected, feed_back_errors
from calipers.solvers.importance import FullHessian, PairedHessian
from calipers.statistics.base import Statistic
from calipers.statistics.sums import HessianSums
from calipers.steps.base import Changes, Layer
from calipers.steps.choices import ObserverChoice
from calipers.steps.quantization import (
    Group,
    QuantizationModifier,
    counted_groups,
    fused_groups,
    solve_activations,
    solve_group,
)
from calipers.topology.model import decoder_layers
from calipers.topology.names import expert_of

_FEW = 4  # weights of a stage, which whoever runs it shows
NOT_FACTORISED = "rounded to nearest: the Hessian of its inputs cannot be factorised"


class _Task(NamedTuple):
    """A weight that is to be rounded.

    :param target: what is rounded: the weight, corrected for what its inputs have become
    :param sums: what was measured of its inputs; None where no token was seen
    :param curve: what the errors are weighed by; None where that is not known
    """

    spec: TensorSpec
    target: Tensor
    sums: HessianSums | None
    curve: Curvature | None
    dtype: torch.dtype

    def rounded(
        self, qparams: QParamsDict, curve: Curvature, *, block: int, sweeps: int
    ) -> tuple[Tensor, QParamsDict]:
        """Round the weight with error feedback; also return its parameters with refitted scales."""
        rounding, scales = rounding_by(qparams, self.spec.args, self.target, self.dtype)
        values, refitted = feed_back_errors(
            self.target, curve, rounding, scales, block=block, sweeps=sweeps
        )
        return values.to(self.dtype), with_scales(qparams, self.spec.args, refitted.scales)


def rounding_by(
    qparams: QParamsDict, args: QuantizationArgs, target: Tensor, dtype: torch.dtype
) -> tuple[Rounding, Scales]:
    """Return how parameters round a matrix, and which scales there can be.

    :param target: the matrix, in float32
    :param dtype: in which weights are stored
    """
    fmt, rows = Format.of(args), len(target)
    layout, global_scale = Layout.of("weight", args), qparams["global_scale"]
    scale, zeros = qparams["scale"].to(target), None
    if global_scale is not None:
        scale = scale / global_scale.to(target)
    if not fmt.symmetric:
        zeros = layout.by_rows(qparams["zero_point"].to(target), rows)
    groups = layout.groups(target.shape[1]).to(target.device)
    storable = storable_scales(fmt, dtype, global_scale, args.scale_dtype)
    rounding = Rounding(layout.by_rows(scale, rows), zeros, groups, fmt)
    return rounding, Scales(storable, layout.rows_per_scale(rows))


def with_scales(qparams: QParamsDict, args: QuantizationArgs, scales: Tensor) -> QParamsDict:
    """Return parameters with other scales, given as :func:`rounding_by` lays them over rows."""
    global_scale = qparams["global_scale"]
    scale = Layout.of("weight", args).from_rows(scales).reshape(qparams["scale"].shape)
    if global_scale is not None:
        scale = scale * global_scale.to(scale)
        scale = scale.to(FP8_DTYPE).to(scale)
    return {**qparams, "scale": scale.to(qparams["scale"])}


def _shrunk_crosses(sums: HessianSums, cross: Tensor) -> tuple[Tensor, Tensor | None]:
    """Trust what goes together as far as there are tokens, as the Hessian is trusted.

    :param cross: Σ of inputs as they were, times as they have become
    """
    tokens = sums.num_tokens
    trust = tokens / (tokens + len(cross))
    diagonal = sums.hessians[0].diagonal() * ((1 - trust) / tokens)
    shrunk_cross = cross * (trust / tokens) + torch.diag_embed(diagonal)
    residual = None if sums.residuals is None else sums.residuals[0]
    return shrunk_cross, None if residual is None else residual * (trust / tokens)


_PASSED_OVER = ("batched_quantization", "sequential_update")
_REMOVED = ("group", "dynamic", True)


class GPTQModifier(QuantizationModifier):
    """Quantizes as :class:`QuantizationModifier` does, its weights with error feedback.

    Scales are found first, by the observer of the weights; then columns are rounded one after the
    other, and each makes up for the errors of those before it.

    :param block_size: how many columns are worked on at a time; it changes the time alone
    :param dampening_frac: what is added to the diagonal of the Hessian, in terms of its mean
    :param actorder: the order of columns: ``static``, or its other name ``weight``: those with the
        largest inputs first; None: as they come
    :param error_propagation: the calibration inputs of a layer: those of the ``float`` model, or
        those of the ``quantized`` one, whose activations are quantized, too; or ``both``: the
        outputs of the former, from the inputs of the latter
    :param sweeps: how often every value is then moved to the best code that all others leave it
    :param offload_hessians: accepted; Hessians are where the model computes, those of one layer

    >>> GPTQModifier(scheme="W4A16", ignore="lm_head").schemes["group_0"].weights.observer
    'optimal'
    """

    orders_columns: ClassVar[bool] = True
    method: ClassVar[str] = "gptq"

    block_size: Annotated[int, Field(ge=1)] = 128
    dampening_frac: Annotated[float, Field(gt=0, le=1)] = 0.01
    actorder: Literal["static", "weight"] | None = "static"
    error_propagation: Propagation = "both"
    sweeps: Annotated[int, Field(ge=0)] = 4
    offload_hessians: bool = False

    @model_validator(mode="before")
    @classmethod
    def _settle_others_keys(cls, given: Any) -> Any:
        """Pass over keys of llm-compressor that change nothing, and tell of what there was once."""
        if given.get("actorder") in _REMOVED:
            raise RecipeError(
                f"is '{given['actorder']}', which compressed-tensors no longer stores",
                subject=f"{cls.__name__}.actorder",
                allowed=("static", "weight", "null"),
                hint="'static' is nearly as accurate, and models run faster",
                path=("actorder",),
            )
        return {key: value for key, value in given.items() if key not in _PASSED_OVER}

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        schemes = self._unobserved()
        if not any(scheme.weights for scheme in schemes.values()):
            raise RecipeError(
                f"{self.label()} quantizes no weights, which is what error feedback is for",
                hint="Give it a scheme with weights, or use QuantizationModifier",
            )
        unordered = "actorder" in self.model_fields_set and self.actorder is None
        for name, scheme in schemes.items():
            if unordered and scheme.weights is not None and scheme.weights.actorder is not None:
                raise RecipeError(
                    f"{self.label()}.actorder is null, but {name} has "
                    f"'{scheme.weights.actorder}'. Keep one.",
                    path=("actorder",),
                )
        return self

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:
        """Say which modules of a model this modifier quantizes, and what it needs for that."""
        planned = super().plan(model, step)
        layers = decoder_layers(model) if self.error_propagation == "both" else ()
        prefixes = tuple(f"{layer}." for layer in layers)
        modules = []
        for module in planned.modules:
            # Experts see other tokens in each run.
            can_pair = module.name.startswith(prefixes) and expert_of(module.name) is None
            gathered = PairedHessian() if can_pair else FullHessian()
            tensors = tuple(
                replace(tensor, gathered=gathered) if tensor.base_name == "weight" else tensor
                for tensor in module.tensors
            )
            modules.append(module if module.columns is None else replace(module, tensors=tensors))
        return replace(planned, modules=tuple(modules), propagation=self.error_propagation)

    def solve(self, layer: Layer) -> Changes:
        """Find the parameters of activations and weights, and what weights are rounded to.

        Weights that share a global scale are solved together.
        """
        own = Changes()
        cache, what = layer.curvatures or CurvatureCache(), "feeding errors back"
        with layer.ranks.step(what):
            groups = layer.ranks.my_part(
                fused_groups(layer.modules),
                lambda group: sum(layer.size(each) * (each.columns or 1) for each in group),
            )
            few = len(groups) <= _FEW
            for group in groups if few else counted_groups(layer, groups, what):
                layer.ranks.check()
                own = own.joined(self._solve_group(layer, group, cache))
        changes = Changes()
        for qparams, tensors, notes in layer.ranks.share((own.qparams, own.tensors, own.notes)):
            changes = changes.joined(Changes(qparams, tensors, notes=notes))
        return changes.joined(Changes(qparams=solve_activations(layer)))

    def _solve_group(self, layer: Layer, group: Group, cache: CurvatureCache) -> Changes:
        tasks = {module: self._task(layer, module, cache) for module in group}
        weights = {module: task.target.to(task.dtype) for module, task in tasks.items()}
        inputs: dict[ModuleSpec, Statistic | None] = dict.fromkeys(group)
        for module, task in tasks.items():
            if task.sums is not None:
                assert task.spec.observer is not None
                hessian, tokens = task.sums.hessians[0], task.sums.num_tokens
                importance = task.spec.observer.importance
                inputs[module] = importance.part_of(hessian, tokens, task.spec.args)
        qparams = solve_group(layer, weights, inputs)
        tensors: dict[tuple[str, str], Tensor] = {}
        notes: dict[str, str] = {}
        for module, task in tasks.items():
            place = module.name, "weight"
            if task.curve is not None:
                tensors[place], qparams[place] = task.rounded(
                    qparams[place], task.curve, block=self.block_size, sweeps=self.sweeps
                )
            elif task.sums is not None:
                notes[module.name] = NOT_FACTORISED
        return Changes(qparams, tensors, notes=notes)

    def _task(self, layer: Layer, module: ModuleSpec, cache: CurvatureCache) -> _Task:
        spec, weight = module.tensor("weight"), layer.weight(module.name).detach()
        assert spec is not None
        target = weight.float()
        # The plan has asked for a sum of products.
        sums = cast("HessianSums | None", layer.measurements.get(module.name, "input", IMPORTANCE))
        if sums is None or not sums.num_tokens:
            return _Task(spec, target, None, None, weight.dtype)
        ordered = spec.args.actorder is not None or self.actorder is not None
        curve, correction = cache.of(sums, self.dampening_frac, ordered)
        if sums.crosses is not None and correction is not None:
            target = corrected(weight, *_shrunk_crosses(sums, sums.crosses[0]), correction)
        return _Task(spec, target, sums, curve, weight.dtype)

    def on_float_inputs(self) -> GPTQModifier:
        """Return the same, calibrated on what a model computes as it is, if it was told nothing."""
        if "error_propagation" in self.model_fields_set:
            return self
        return self._changed({"error_propagation": "float"})

    def _default_choice(self, base_name: str, options: dict[str, Any]) -> ObserverChoice:
        if base_name == "weight" and not options:
            return ObserverChoice(name="optimal", options={"importance": "hessian"})
        return super()._default_choice(base_name, options)
