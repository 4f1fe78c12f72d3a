"""The modifier that rounds weights with error feedback."""

from __future__ import annotations

from collections.abc import Callable
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
from calipers.solvers.gptq import Curvature, Scales, corrected, curvature, feed_back_errors
from calipers.solvers.importance import FullHessian, PairedHessian
from calipers.statistics.base import Statistic
from calipers.statistics.sums import HessianSums, shrunk
from calipers.steps.base import Changes, Layer
from calipers.steps.choices import ObserverChoice
from calipers.steps.quantization import QuantizationModifier
from calipers.steps.solving import Group, counted_groups, fused_groups, observed, solve_activations
from calipers.topology.model import decoder_layers
from calipers.topology.names import expert_of

_CORRECTION_DAMPING = 0.05  # at least: what earlier layers lost is known less well than inputs are
_FEW = 4  # weights of a stage, which whoever runs it shows
NOT_FACTORISED = "rounded to nearest: the Hessian of its inputs cannot be factorised"


class Feedback(NamedTuple):
    """How errors are fed back.

    :param by_activation: whether columns with the largest inputs come first
    """

    block: int
    damping: float
    sweeps: int
    by_activation: Callable[[QuantizationArgs], bool]


class Inputs(NamedTuple):
    """What is known of the inputs of a weight.

    :param hessian: Σ x xᵀ, as the inputs have become
    :param cross: Σ of inputs as they were, times as they have become; None: they are the same
    :param residual: Σ of what that has lost to which outputs are added, times the same inputs
    """

    hessian: Tensor
    cross: Tensor | None
    residual: Tensor | None
    tokens: int

    @classmethod
    def of(cls, statistic: Statistic | None) -> Inputs | None:
        """Read a statistic; None where it has seen nothing."""
        if statistic is None or not statistic.num_tokens:
            return None
        sums = cast("HessianSums", statistic)  # the plan has asked for one
        paired = (sums.crosses, sums.residuals)
        cross, residual = (None if blocks is None else blocks[0] for blocks in paired)
        return cls(sums.hessians[0], cross, residual, sums.num_tokens)


def solve_with_feedback(layer: Layer, settings: Feedback) -> Changes:
    """Find parameters and codes of weights; those that share a global scale are solved together."""
    mine = Changes()
    cache = layer.curvatures or CurvatureCache()
    what = "feeding errors back"
    with layer.ranks.step(what):
        groups = layer.ranks.my_part(fused_groups(layer.modules), lambda group: _work(layer, group))
        few = len(groups) <= _FEW
        for group in groups if few else counted_groups(layer, groups, what):
            layer.ranks.check()
            mine = mine.joined(_solve_group(layer, group, settings, cache))
    found = Changes()
    for qparams, tensors, notes in layer.ranks.share((mine.qparams, mine.tensors, mine.notes)):
        found = found.joined(Changes(qparams, tensors, notes=notes))
    return found


def _work(layer: Layer, group: Group) -> int:
    return sum(layer.size(module) * (module.columns or 1) for module in group)


class _Curves(NamedTuple):
    """The Hessian of some inputs, factorised for two uses.

    :param errors: what errors of rounding are weighed by; None where it cannot be factorised
    :param correction: what corrects for inputs that have changed; None where none have
    """

    errors: Curvature | None = None
    correction: Curvature | None = None


class CurvatureCache:
    """Keeps the latest Hessian factorised: modules with the same input are solved in a row."""

    def __init__(self) -> None:
        self._latest: tuple[tuple[int, bool, float], Tensor, _Curves] | None = None

    def of(self, inputs: Inputs, args: QuantizationArgs, settings: Feedback) -> _Curves:
        """Return the curvatures of some inputs."""
        ordered, damping = settings.by_activation(args), settings.damping
        key = inputs.hessian.data_ptr(), ordered, damping
        if self._latest is None or self._latest[0] != key:
            mean = shrunk(inputs.hessian / inputs.tokens, inputs.tokens, damping=0.0)
            errors, correction = curvature(mean, damping, ordered), None
            if errors is not None and inputs.cross is not None:
                correction = curvature(mean, max(damping, _CORRECTION_DAMPING))
            self._latest = key, inputs.hessian, _Curves(errors, correction)
        return self._latest[2]


class _Task(NamedTuple):
    """A weight that is to be rounded.

    :param target: what is rounded: the weight, corrected for what its inputs have become
    :param curve: what the errors are weighed by; None where that is not known
    """

    spec: TensorSpec
    target: Tensor
    inputs: Inputs | None
    curve: Curvature | None
    dtype: torch.dtype

    @classmethod
    def of(
        cls, layer: Layer, module: ModuleSpec, settings: Feedback, cache: CurvatureCache
    ) -> _Task:
        spec, weight = module.tensor("weight"), layer.weight(module.name).detach()
        assert spec is not None
        inputs = Inputs.of(layer.measurements.get(module.name, "input", IMPORTANCE))
        curve, correction = _Curves() if inputs is None else cache.of(inputs, spec.args, settings)
        target = weight.float()
        if inputs is not None and inputs.cross is not None and correction is not None:
            target = corrected(weight, *_shrunk_crosses(inputs, inputs.cross), correction)
        return cls(spec, target, inputs, curve, weight.dtype)

    def importance(self) -> Statistic | None:
        """Return what the observer wants to know of the inputs."""
        if self.inputs is None:
            return None
        assert self.spec.observer is not None
        importance = self.spec.observer.importance
        return importance.part_of(self.inputs.hessian, self.inputs.tokens, self.spec.args)


def _solve_group(layer: Layer, group: Group, settings: Feedback, cache: CurvatureCache) -> Changes:
    tasks = {module: _Task.of(layer, module, settings, cache) for module in group}
    seen = {module: task.target.to(task.dtype) for module, task in tasks.items()}
    known = {module: task.importance() for module, task in tasks.items()}
    qparams = observed(layer, seen, known)
    rounded: dict[tuple[str, str], Tensor] = {}
    notes: dict[str, str] = {}
    for module, task in tasks.items():
        if task.curve is not None:
            found = qparams[module.name, "weight"]
            rounding = _rounding(task.spec.args, found, task.target)
            values, refitted = feed_back_errors(
                task.target,
                task.curve,
                rounding,
                _scales(task, found),
                block=settings.block,
                sweeps=settings.sweeps,
            )
            rounded[module.name, "weight"] = values.to(task.dtype)
            qparams[module.name, "weight"] = _with_scales(task.spec.args, found, refitted)
        elif task.inputs is not None:
            notes[module.name] = NOT_FACTORISED
    return Changes(qparams, rounded, notes=notes)


def _shrunk_crosses(inputs: Inputs, cross: Tensor) -> tuple[Tensor, Tensor | None]:
    """Trust what goes together as far as there are tokens, as the Hessian is trusted."""
    trust = inputs.tokens / (inputs.tokens + len(cross))
    diagonal = inputs.hessian.diagonal() * ((1 - trust) / inputs.tokens)
    shrunk_cross = cross * (trust / inputs.tokens) + torch.diag_embed(diagonal)
    if inputs.residual is None:
        return shrunk_cross, None
    return shrunk_cross, inputs.residual * (trust / inputs.tokens)


def _rounding(args: QuantizationArgs, found: QParamsDict, weight: Tensor) -> Rounding:
    layout, fmt = Layout.of("weight", args), Format.of(args)
    scale = found["scale"].to(weight)
    if found["global_scale"] is not None:
        scale = scale / found["global_scale"].to(weight)
    zeros = None if fmt.symmetric else layout.by_rows(found["zero_point"].to(weight), len(weight))
    groups = layout.groups(weight.shape[1]).to(weight.device)
    return Rounding(layout.by_rows(scale, len(weight)), zeros, groups, fmt)


def _scales(task: _Task, found: QParamsDict) -> Scales:
    """Return which scales the weight of a task can have."""
    args, fmt = task.spec.args, Format.of(task.spec.args)
    storable = storable_scales(fmt, task.dtype, found["global_scale"], args.scale_dtype)
    return Scales(storable, Layout.of("weight", args).rows_per_scale(len(task.target)))


def _with_scales(args: QuantizationArgs, found: QParamsDict, rounding: Rounding) -> QParamsDict:
    """Return the parameters of a weight with other scales."""
    scale = Layout.of("weight", args).from_rows(rounding.scales).reshape(found["scale"].shape)
    if found["global_scale"] is not None:
        scale = scale * found["global_scale"].to(scale)
        scale = scale.to(FP8_DTYPE).to(scale)
    return {**found, "scale": scale.to(found["scale"].dtype)}


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
    :param error_propagation: what layers are calibrated on: what the ``float`` layers before give,
        or the ``quantized`` ones; or ``both``, to give on the latter what was meant by the former
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
        modules = tuple(self._with_hessian(module, prefixes) for module in planned.modules)
        return replace(planned, modules=modules, propagation=self.error_propagation)

    def solve(self, layer: Layer) -> Changes:
        """Find the parameters of activations and weights, and what weights are rounded to."""
        settings = Feedback(self.block_size, self.dampening_frac, self.sweeps, self._is_ordered)
        fed = solve_with_feedback(layer, settings)
        return fed.joined(Changes(qparams=solve_activations(layer)))

    def on_float_inputs(self) -> GPTQModifier:
        """Return the same, calibrated on what a model computes as it is, if it was told nothing."""
        if "error_propagation" in self.model_fields_set:
            return self
        return self._changed({"error_propagation": "float"})

    def _is_ordered(self, args: QuantizationArgs) -> bool:
        """Whether the columns of a weight with the largest inputs are rounded first."""
        return args.actorder is not None or self.actorder is not None

    def _default_choice(self, base_name: str, options: dict[str, Any]) -> ObserverChoice:
        if base_name == "weight" and not options:
            return ObserverChoice(name="optimal", options={"importance": "hessian"})
        return super()._default_choice(base_name, options)

    def _with_hessian(self, module: ModuleSpec, layers: tuple[str, ...]) -> ModuleSpec:
        """Let the inputs of a weight be gathered; experts see other tokens in each run."""
        if module.columns is None:
            return module
        can_pair = module.name.startswith(layers) and expert_of(module.name) is None
        gathered = PairedHessian() if can_pair else FullHessian()
        tensors = tuple(_gathering(tensor, gathered) for tensor in module.tensors)
        return replace(module, tensors=tensors)


def _gathering(tensor: TensorSpec, gathered: FullHessian) -> TensorSpec:
    return replace(tensor, gathered=gathered) if tensor.base_name == "weight" else tensor
