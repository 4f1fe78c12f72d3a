"""The modifier that rounds weights with error feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from calipers.solvers.cross_validation import Problem, choose
from calipers.solvers.gptq import (
    CORRECTION_DAMPING,
    DAMPING,
    Curvature,
    CurvatureCache,
    Moments,
    Regularization,
    Scales,
    corrected,
    feed_back_errors,
)
from calipers.solvers.importance import FullHessian, PairedHessian
from calipers.statistics.base import Statistic
from calipers.statistics.sums import HessianSums
from calipers.steps.base import Changes, Layer
from calipers.steps.choices import ObserverChoice
from calipers.steps.quantization import (
    Group,
    QuantizationModifier,
    Solved,
    counted_groups,
    fused_groups,
    solve_activations,
    solve_group,
)
from calipers.topology.model import decoder_layers
from calipers.topology.names import expert_of

_FEW = 4  # weights of a stage, which whoever runs it shows
_ROWS = 128  # of a weight, by which its regularization is chosen: each is rounded by itself
NOT_FACTORISED = "rounded to nearest: the Hessian of its inputs cannot be factorised"
NOT_CHOSEN = (
    f"damped by {DAMPING}, and corrected by {CORRECTION_DAMPING}: there are no two folds of the "
    "data to choose that by"
)


def _weight_of(module: ModuleSpec) -> TensorSpec:
    spec = module.tensor("weight")
    assert spec is not None
    return spec


def _judged_rows(layer: Layer, module: ModuleSpec) -> slice:
    """Return the rows of a weight by which its regularization is chosen; all where blocks are."""
    rows = len(layer.weight(module.name))
    together = Layout.of("weight", _weight_of(module).args).rows_per_scale(rows)
    return slice(None, None, max(1, rows // _ROWS) if together in (1, rows) else None)


def _by_input(layer: Layer, groups: Sequence[Group]) -> dict[Group, list[Group]]:
    """Put neighbours together that have the same input: their Hessians are factorised once."""
    runs: list[list[Group]] = []
    latest: Statistic | None = None
    for group in groups:
        sums = layer.measurements.get(group[0].name, "input", IMPORTANCE)
        if not runs or latest is None or sums is None or not _is_same(latest, sums):
            runs.append([])
        runs[-1].append(group)
        latest = sums
    return {group: run for run in runs for group in run}


def _is_same(one: Statistic, other: Statistic) -> bool:
    """Whether two have seen the same; those of several processes hold it once for each reader."""
    if one.origin() == other.origin():
        return one.num_tokens > 0
    mine, theirs = one.fields(), other.fields()
    return mine.keys() == theirs.keys() and all(
        mine[name].shape == theirs[name].shape and torch.equal(mine[name], theirs[name])
        for name in mine
    )


class _Task(NamedTuple):
    """A weight that is to be rounded.

    :param target: what is rounded: the weight, corrected for what its inputs have become
    :param seen: what was seen of its inputs; None where no token was
    :param curve: what the errors are weighed by; None where that is not known
    """

    spec: TensorSpec
    target: Tensor
    seen: Moments | None
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


_PASSED_OVER = ("batched_quantization", "sequential_update")
_REMOVED = ("group", "dynamic", True)


class GPTQModifier(QuantizationModifier):
    """Quantizes as :class:`QuantizationModifier` does, its weights with error feedback.

    Scales are found first, by the observer of the weights; then columns are rounded one after the
    other, and each makes up for the errors of those before it.

    :param block_size: how many columns are worked on at a time; it changes the time alone
    :param dampening_frac: what is added to the diagonal of the Hessian, in terms of its mean; None:
        it is chosen for each weight, as is how far corrections are trusted, by what is lost on a
        fold of the data when the weight is solved on the others
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
    dampening_frac: Annotated[float, Field(gt=0, le=1)] | None = None
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
                replace(tensor, gathered=gathered, in_folds=self.dampening_frac is None)
                if tensor.base_name == "weight"
                else tensor
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
            side_by_side = _by_input(layer, groups)
            chosen: dict[Group, Regularization | None] = {}
            for group in groups if few else counted_groups(layer, groups, what):
                layer.ranks.check()
                if group not in chosen:
                    chosen |= self._regularizations(layer, side_by_side[group])
                own = own.joined(self._solve_group(layer, group, cache, chosen[group]))
        changes = Changes()
        mine = own.qparams, own.tensors, own.notes, own.chosen
        for qparams, tensors, notes, choices in layer.ranks.share(mine):
            changes = changes.joined(Changes(qparams, tensors, notes=notes, chosen=choices))
        return changes.joined(Changes(qparams=solve_activations(layer)))

    def _regularizations(
        self, layer: Layer, groups: Sequence[Group]
    ) -> dict[Group, Regularization | None]:
        """Choose by folds of the data how groups with one input are regularized.

        None stands for constants: they are given, or there is too little to choose by.
        """
        name = groups[0][0].name
        sums = layer.measurements.get(name, "input", IMPORTANCE)
        kept = layer.measurements.folds(name, "input", IMPORTANCE)
        seen = [cast("HessianSums", each) for each in kept if each.num_tokens]
        if self.dampening_frac is not None or sums is None or not seen:
            return dict.fromkeys(groups)
        folds = list(map(Moments.of, seen))
        whole = Moments.of(cast("HessianSums", sums))
        last = whole.less(Moments.sum_of(folds))
        folds += [last] if last.tokens else []
        if len(folds) < 2:
            return dict.fromkeys(groups)
        rows = _judged_rows(layer, groups[0][0])
        problems = [self._problem(layer, group) for group in groups]
        found = choose(problems, [fold.of_rows(rows) for fold in folds], whole.of_rows(rows))
        return dict(zip(groups, found, strict=True))

    def _problem(self, layer: Layer, group: Group) -> Problem:
        weights = [layer.weight(each.name).detach()[_judged_rows(layer, each)] for each in group]

        def rounded(targets: Sequence[Tensor], seen: Moments, curve: Curvature) -> list[Tensor]:
            layer.ranks.check()
            tasks = {
                module: _Task(_weight_of(module), target, seen, curve, weight.dtype)
                for module, target, weight in zip(group, targets, weights, strict=True)
            }
            tensors, _ = self._rounded(layer, tasks)
            return [tensors[module.name, "weight"] for module in group]

        return Problem(weights, rounded, any(map(self._is_ordered, group)))

    def _solve_group(
        self,
        layer: Layer,
        group: Group,
        cache: CurvatureCache,
        regularization: Regularization | None,
    ) -> Changes:
        used = regularization or Regularization.given(self.dampening_frac or DAMPING)
        tasks = {module: self._task(layer, module, cache, used) for module in group}
        tensors, qparams = self._rounded(layer, tasks)
        notes: dict[str, str] = {}
        chosen: dict[str, dict[str, float]] = {}
        for module, task in tasks.items():
            if task.seen is not None and task.curve is None:
                notes[module.name] = NOT_FACTORISED
            elif task.seen is not None and self.dampening_frac is None:
                if regularization is None:
                    notes[module.name] = NOT_CHOSEN
                else:
                    is_corrected = task.seen.cross is not None
                    names = ("damping", "correction") if is_corrected else ("damping",)
                    chosen[module.name] = {n: getattr(regularization, n) for n in names}
        return Changes(qparams, tensors, notes=notes, chosen=chosen)

    def _rounded(
        self, layer: Layer, tasks: Mapping[ModuleSpec, _Task]
    ) -> tuple[dict[tuple[str, str], Tensor], Solved]:
        """Find scales, and round with error feedback what can be."""
        weights = {module: task.target.to(task.dtype) for module, task in tasks.items()}
        inputs: dict[ModuleSpec, Statistic | None] = dict.fromkeys(tasks)
        for module, task in tasks.items():
            if task.seen is not None:
                assert task.spec.observer is not None
                importance = task.spec.observer.importance
                inputs[module] = importance.part_of(
                    task.seen.hessian, task.seen.tokens, task.spec.args
                )
        qparams = solve_group(layer, weights, inputs)
        tensors: dict[tuple[str, str], Tensor] = {}
        for module, task in tasks.items():
            place = module.name, "weight"
            if task.curve is not None:
                tensors[place], qparams[place] = task.rounded(
                    qparams[place], task.curve, block=self.block_size, sweeps=self.sweeps
                )
        return tensors, qparams

    def _is_ordered(self, module: ModuleSpec) -> bool:
        return self.actorder is not None or _weight_of(module).args.actorder is not None

    def _task(
        self, layer: Layer, module: ModuleSpec, cache: CurvatureCache, used: Regularization
    ) -> _Task:
        spec, weight = _weight_of(module), layer.weight(module.name).detach()
        target = weight.float()
        # The plan has asked for a sum of products.
        sums = cast("HessianSums | None", layer.measurements.get(module.name, "input", IMPORTANCE))
        if sums is None or not sums.num_tokens:
            return _Task(spec, target, None, None, weight.dtype)
        curve, correction = cache.of(sums, used, self._is_ordered(module))
        seen = Moments.of(sums)
        if seen.cross is not None and correction is not None:
            target = corrected(weight, *seen.mean_crosses(), correction)
        return _Task(spec, target, seen, curve, weight.dtype)

    def on_float_inputs(self) -> GPTQModifier:
        """Return the same, calibrated on what a model computes as it is, if it was told nothing."""
        if "error_propagation" in self.model_fields_set:
            return self
        return self._changed({"error_propagation": "float"})

    def _default_choice(self, base_name: str, options: dict[str, Any]) -> ObserverChoice:
        if base_name == "weight" and not options:
            return ObserverChoice(name="optimal", options={"importance": "hessian"})
        return super()._default_choice(base_name, options)
