"""The modifier that rounds weights with error feedback."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field, model_validator
from typing_extensions import Self

from calipers.errors import RecipeError
from calipers.planning.plan import Propagation, StepPlan
from calipers.planning.specs import ModuleSpec, TensorSpec
from calipers.solvers.importance import FullHessian, PairedHessian
from calipers.steps.choices import ObserverChoice
from calipers.steps.feedback import Feedback, solve_with_feedback
from calipers.steps.layer import Changes, Layer
from calipers.steps.quantization import QuantizationModifier
from calipers.steps.solving import solve_activations
from calipers.topology.layers import decoder_layers
from calipers.topology.names import expert_of

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
