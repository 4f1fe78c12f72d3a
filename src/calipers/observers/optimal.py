"""An observer of weights that finds the true optimum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field
from torch import Tensor

from calipers.errors import UnsuitableError, no_statistics, weight_gone
from calipers.numerics.formats import Format
from calipers.numerics.layout import has_global_scale
from calipers.observers.base import Observer, in_pieces
from calipers.observers.classic import searched_range
from calipers.observers.definition import Definition, QParamsDict
from calipers.observers.options import ImportanceOptions, ObserverOptions, SearchOptions
from calipers.solvers.importance import ImportanceName, Weights
from calipers.solvers.scales import (
    Solutions,
    common_global_scale,
    error_of,
    minmax,
    of_range,
)
from calipers.statistics.base import Reduction, guarded

LEAST_IMPORTANCE = 2.0**-20
"""Of the mean. An idle channel counts so little, but it counts: its weights get a sound scale."""


class OptimalOptions(ImportanceOptions):
    """What an optimum is."""

    importance: ImportanceName = Field(
        default="imatrix", description="how errors count: alike, by E[x²], or by E[x xᵀ]"
    )
    signed_scale: bool = Field(
        default=False, description="negative scales too (symmetric int), for the larger side"
    )
    shortlist: Annotated[int, Field(ge=1, le=256)] = Field(
        default=16, description="candidates by E[x²] that are judged by E[x xᵀ]"
    )


class ErrorReport(NamedTuple):
    """The error of a tensor under three choices of its parameters, as the observer counts it.

    It is infinite where a value leaves the dtype of the tensor, which ``chosen`` never lets happen.
    """

    minmax: float
    mse: float
    chosen: float


class OptimalObserver(Observer):
    """Takes, of all scales that can be stored, the one with the least Σ w·(q−x)².

    ``attach`` it to a Linear, run data through the model, ``detach`` it, observe the weight. It
    refers to the last weight it has seen, for ``report`` and for what it is fused with.

    >>> from compressed_tensors.quantization import QuantizationArgs
    >>> args = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    >>> linear = torch.nn.Linear(64, 16)
    >>> observer = OptimalObserver("weight", args, importance="hessian")
    >>> observer.attach(linear)
    >>> _ = linear(torch.randn(256, 64))
    >>> observer.detach(linear)
    >>> observer(linear.weight).get_qparams()["scale"].shape
    torch.Size([16, 2])
    >>> observer.report().chosen < observer.report().minmax
    True
    """

    remembers = "Σx² or Σx xᵀ of the inputs; the best of all storable scales"
    when = "weights: the recommended one, under importance"
    gathers_inputs = True
    Options = OptimalOptions
    options: OptimalOptions
    definition = Definition(is_optimal=True, least_importance=LEAST_IMPORTANCE)
    reductions: ClassVar[Mapping[str, Reduction]] = {
        "_scale": Reduction.LAST,
        "_zero_point": Reduction.LAST,
        "_global_scale": Reduction.LAST,
    }
    _scale: Tensor
    _zero_point: Tensor
    _global_scale: Tensor

    @classmethod
    def check(
        cls, base_name: str, args: QuantizationArgs, options: ObserverOptions, fmt: Format
    ) -> None:
        """Refuse anything but weights, and negative scales where they have no use."""
        super().check(base_name, args, options, fmt)
        if base_name != "weight":
            raise UnsuitableError(
                "looks at a whole weight at once",
                subject=cls.label_of(base_name),
                hint="For activations and attention states use 'histogram_mse', which finds the "
                "optimum over all data",
            )
        signed = isinstance(options, OptimalOptions) and options.signed_scale
        if signed and not fmt.takes_signed_scales:
            raise UnsuitableError(
                "signed_scale is for symmetric int formats, whose lowest code has no counterpart",
                where=cls.label_of(base_name),
                hint=f"Leave it out for {fmt.name}",
            )

    # What is observed

    @in_pieces
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Find the optimum; one that depends on fused observers is found when asked for."""
        super().update_statistics_from_observed(observed)
        for name in OptimalObserver.reductions:  # they are of the weight before
            if name in self.fields():
                delattr(self, name)
        if self._shares_global_scale:
            return
        global_scale = self._best_global_scale()
        solution = self.solutions().under(global_scale)
        self.absorb(_scale=solution.scale, _zero_point=solution.zero_point)
        if global_scale is not None:
            self.absorb(_global_scale=global_scale)

    # What is asked for

    @torch.no_grad()
    @guarded
    def get_global_scale(self) -> Tensor | None:
        """Return the scale of the local scales that is best for all fused observers together."""
        if not has_global_scale(self.args):
            return None
        if not self.has_statistics:
            raise no_statistics(self.module_name)
        if not self._shares_global_scale and "_global_scale" in self.fields():
            return self._global_scale.clone()
        return self._best_global_scale()

    @torch.no_grad()
    @guarded
    def get_qparams(self) -> QParamsDict:
        """Return the parameters; with fused observers, those under their common global scale."""
        if not self.has_statistics:
            raise no_statistics(self.module_name)
        global_scale = self.get_global_scale()
        if self._shares_global_scale or "_scale" not in self.fields():
            scale, zero_point, _ = self.solutions().under(global_scale)
        else:
            scale, zero_point = self._scale, self._zero_point
        scale, zero_point = scale.clone(), zero_point.clone()
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}

    @torch.no_grad()
    @guarded
    def report(self) -> ErrorReport:
        """Return the error under min-max, under the classic ``memoryless_mse``, and as chosen."""
        problem, qparams = self.solutions().problem, self.get_qparams()
        global_scale = qparams["global_scale"]
        usual = None if global_scale is None else super().get_global_scale()
        shrunk = searched_range(problem._replace(weights=Weights()), SearchOptions())
        return ErrorReport(
            minmax(problem, usual).error,
            of_range(problem, *shrunk, usual).error,
            error_of(problem, qparams["scale"], qparams["zero_point"], global_scale),
        )

    @property
    def _shares_global_scale(self) -> bool:
        return has_global_scale(self.args) and bool(self._fused_observers)

    def solutions(self) -> Solutions:
        """Return the best parameters of the weight under any global scale; refuse if it is gone."""
        if self._solutions is None:
            raise weight_gone(self.label(), "no longer has")
        self._solutions.label = self.label()
        return self._solutions

    def _best_global_scale(self) -> Tensor | None:
        """Return the global scale that is best for all fused weights together."""
        usual = Observer.get_global_scale(self)
        if usual is None:
            return None
        fused = [self, *self._fused_observers]
        optimal = [other for other in fused if isinstance(other, OptimalObserver)]
        if len(optimal) < len(fused):
            return usual  # the others take that, and all must have the same
        return common_global_scale([other.solutions() for other in optimal], usual)

    @guarded
    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._solutions = None
