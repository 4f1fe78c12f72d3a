"""An observer of weights that finds the true optimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationStrategy
from pydantic import Field
from torch import Tensor

from calipers.errors import (
    ImportanceError,
    ImportanceUnsupportedError,
    NoStatisticsError,
    UnsuitableError,
    WeightGoneError,
)
from calipers.kernels.search import search_range
from calipers.numerics.formats import Format
from calipers.numerics.layout import Layout, strategy_name
from calipers.numerics.qparams import safe_qparams
from calipers.observers.base import Observer, QParamsDict
from calipers.observers.gathering import GathersInputs, ImportanceOptions
from calipers.observers.imatrix import checked_importance
from calipers.observers.observation import in_pieces
from calipers.observers.options import SearchOptions
from calipers.observers.solving import Problem, Solution, error_of, solve
from calipers.statistics.base import Reduction
from calipers.statistics.guarding import guarded
from calipers.statistics.hessian import BlockHessians, block_width, shrunk
from calipers.statistics.moments import SquareSums

LEAST_IMPORTANCE = 2.0**-20
"""Of the mean. An idle channel counts so little, but it counts: its weights get a sound scale."""

_GLOBAL_FACTORS = (0.875, 0.75, 0.625)
_SAMPLE = 1 << 15  # pieces of a tensor by which a global scale is chosen


class OptimalOptions(ImportanceOptions):
    """What an optimum is."""

    importance: Literal["none", "imatrix", "hessian"] = Field(
        default="imatrix", description="how errors count: alike, by E[x²], or by E[x xᵀ]"
    )
    signed_scale: bool = Field(
        default=False, description="negative scales too (symmetric int), for the larger side"
    )
    shortlist: Annotated[int, Field(ge=1, le=256)] = Field(
        default=16, description="candidates by E[x²] that are judged by E[x xᵀ]"
    )


class Report(NamedTuple):
    """The error of a tensor under three choices of its parameters, as the observer counts it."""

    minmax: float
    mse: float
    chosen: float


@Observer.register("optimal")
class OptimalObserver(GathersInputs, SquareSums, BlockHessians):
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
    Options = OptimalOptions
    options: OptimalOptions
    reductions: ClassVar[Mapping[str, Reduction]] = {
        "_scale": Reduction.LAST,
        "_zero_point": Reduction.LAST,
        "_global_scale": Reduction.LAST,
    }
    _scale: Tensor
    _zero_point: Tensor
    _global_scale: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._problem: Problem | None = None
        self._seen_version: int | None = None
        # By global scale: what was worked out, so that fused observers need not do it again.
        self._solutions: dict[float, Solution] = {}
        self._errors: dict[tuple[str, float], float] = {}
        fmt = Format.of(self.args)
        if self.base_name != "weight":
            raise UnsuitableError(
                f"{self.label()} looks at a whole weight at once. For activations and attention "
                "states use 'histogram_mse', which finds the optimum over all data."
            )
        if self.options.signed_scale and not (fmt.kind == "int" and fmt.symmetric):
            raise UnsuitableError(
                f"{self.label()}: signed_scale is for symmetric int formats, whose lowest code has "
                f"no counterpart. Leave it out for {fmt.kind}{fmt.bits}."
            )

    # What is gathered

    def gathered_fields(self) -> Iterable[str]:
        """Name the sums that the importance is made of."""
        of = {"none": (), "imatrix": SquareSums.reductions, "hessian": BlockHessians.reductions}
        return of[self.options.importance]

    def begin_gathering(self, channels: int) -> None:
        """Begin with sums of zero."""
        self.gather(torch.zeros(0, channels))

    def gather(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add an input to the sums."""
        if self.options.importance == "imatrix":
            self.absorb_tokens(x, mask)
        elif self.options.importance == "hessian":
            self.absorb_outer(x, self._block_width(x.shape[-1]), mask)

    def _block_width(self, columns: int) -> int:
        if self.args.strategy == QuantizationStrategy.BLOCK:
            return block_width(columns, self.args.block_structure[1])
        group_size = self.args.group_size or 0
        return block_width(columns, group_size if group_size > 0 else columns)

    # What is observed

    @in_pieces
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Find the optimum; one that depends on fused observers is found when asked for."""
        low, high = self.extrema(observed)
        pieces = self.pieces(observed)
        missing = self._observation.extrema.missing if self._observation else None
        if missing is not None:  # pieces without any finite value are pieces of zeros
            low, high = low.masked_fill(missing, 0), high.masked_fill(missing, 0)
        weights, hessian = self._usable_importance(pieces)
        self._forget_results()
        self._seen_version = _version(pieces)
        self._problem = Problem(
            pieces.detach(),
            low,
            high,
            self.args,
            weights=weights,
            hessian=hessian,
            signed=self.options.signed_scale,
            shortlist=self.options.shortlist if hessian is not None else 1,
        )
        self.absorb(min_vals=low, max_vals=high)
        if self._shares_global_scale:
            return
        global_scale = self._best_global_scale()
        solution = self._solved(global_scale)
        self.absorb(_scale=solution.scale, _zero_point=solution.zero_point)
        if global_scale is not None:
            self.absorb(_global_scale=global_scale)

    def _usable_importance(self, pieces: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.options.importance == "none":
            return None, None
        return self.or_plain(self._importance, pieces) or (None, None)

    def _importance(self, pieces: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return what errors are weighed by, and blocks of the Hessian by piece."""
        assert self._observation is not None
        layout = self._observation.layout
        blocks = None
        if self.options.importance == "imatrix":
            count, sums = (getattr(self, name, None) for name in ("_imatrix_count", "_imatrix_sum"))
        else:
            count, blocks = (getattr(self, n, None) for n in ("_hessian_count", "_hessian_sum"))
            sums = None if blocks is None else blocks.diagonal(dim1=1, dim2=2).flatten()
        if count is None or sums is None or not int(count):
            raise ImportanceError(self.label(), "no importance was gathered")
        columns = layout.columns_of(pieces, sums.numel())
        if columns is None:
            raise ImportanceUnsupportedError(
                self.label(),
                f"importance has no meaning for a weight without columns, cut by strategy "
                f"'{strategy_name(self.args)}'",
            )
        diagonal = checked_importance(sums / count, columns, self.label())
        weights = layout.over_columns(diagonal.clamp(min=LEAST_IMPORTANCE))
        if blocks is None:
            return weights, None
        mean = float((sums / count).mean())
        return weights, self._hessian(blocks / count / mean, int(count), layout, pieces)

    def _hessian(self, blocks: Tensor, tokens: int, layout: Layout, pieces: Tensor) -> Tensor:
        width, piece = blocks.shape[-1], pieces.shape[-1]
        if layout.order is not None:
            raise ImportanceError(
                self.label(), "a Hessian is of neighbouring columns, which g_idx tears apart"
            )
        if not bool(torch.isfinite(blocks).all()):
            raise ImportanceError(self.label(), "the Hessian has NaN or Inf in it")
        padded = (
            -blocks.shape[0] * width % piece
        )  # columns of a block that the matrix does not fill
        if (width % piece and piece % width) or padded % width:
            raise ImportanceError(
                self.label(),
                f"the Hessian has blocks of {width} columns, which do not fit pieces of {piece} "
                "columns. Gather it with this observer",
            )
        return torch.cat([shrunk(blocks, tokens), blocks.new_zeros(padded // width, width, width)])

    # What is asked for

    @torch.no_grad()
    @guarded
    def get_global_scale(self) -> Tensor | None:
        """Return the scale of the local scales that is best for all fused observers together."""
        if self.args.strategy != QuantizationStrategy.TENSOR_GROUP:
            return None
        if not self.has_statistics:
            raise NoStatisticsError(self.module_name)
        if not self._shares_global_scale and "_global_scale" in self.fields():
            return self._global_scale.clone()
        return self._best_global_scale()

    @torch.no_grad()
    @guarded
    def get_qparams(self) -> QParamsDict:
        """Return the parameters; with fused observers, those under their common global scale."""
        if not self.has_statistics:
            raise NoStatisticsError(self.module_name)
        global_scale = self.get_global_scale()
        if self._shares_global_scale or "_scale" not in self.fields():
            scale, zero_point, _ = self._solved(global_scale)
        else:
            scale, zero_point = self._scale, self._zero_point
        return {
            "scale": scale.clone(),
            "zero_point": zero_point.clone(),
            "global_scale": global_scale,
        }

    @torch.no_grad()
    @guarded
    def report(self) -> Report:
        """Return the error under min-max, under the classic ``memoryless_mse``, and as chosen."""
        problem, qparams = self._weight(), self.get_qparams()
        global_scale = qparams["global_scale"]
        classic = SearchOptions()
        shrunk_range = search_range(
            problem.pieces,
            problem.low,
            problem.high,
            self.args,
            factors=classic.factors,
            norm=classic.norm,
            patience=classic.stop_after,
        )
        usual = None if global_scale is None else super().get_global_scale()
        minmax, mse = (
            error_of(problem, *safe_qparams(*ends, self.args, usual), usual)
            for ends in ((problem.low, problem.high), shrunk_range)
        )
        chosen = error_of(problem, qparams["scale"], qparams["zero_point"], global_scale)
        return Report(minmax, mse, chosen)

    @property
    def _shares_global_scale(self) -> bool:
        grouped = self.args.strategy == QuantizationStrategy.TENSOR_GROUP
        return grouped and bool(self._fused_observers)

    def _weight(self) -> Problem:
        if self._problem is None:
            raise WeightGoneError(self.label(), "no longer has")
        if _version(self._problem.pieces) != self._seen_version:
            raise WeightGoneError(self.label(), "cannot trust, since it was changed in place,")
        return self._problem

    def _solved(self, global_scale: Tensor | None) -> Solution:
        key = 0.0 if global_scale is None else float(global_scale)
        if key not in self._solutions:
            self._solutions[key] = solve(self._weight(), global_scale)
        return self._solutions[key]

    def _best_global_scale(self) -> Tensor | None:
        """Choose among a few by how well a sample of all fused tensors can be quantized."""
        usual = Observer.get_global_scale(self)
        if usual is None:
            return None
        fused = [self, *self._fused_observers]
        able = [other for other in fused if isinstance(other, OptimalObserver)]
        if len(able) < len(fused):  # the others take the usual one, and all must have the same
            return usual
        candidates = [usual, *(usual * factor for factor in _GLOBAL_FACTORS)]
        errors = [_total(able, OptimalObserver._sampled_error, scale) for scale in candidates]
        best = candidates[min(range(len(errors)), key=errors.__getitem__)]
        if best is usual:
            return usual
        # A sample may mislead; under the usual one nothing errs more than with min-max.
        chosen = _total(able, OptimalObserver._solved_error, best)
        return best if chosen <= _total(able, OptimalObserver._minmax_error, usual) else usual

    def _sampled_error(self, global_scale: Tensor) -> float:
        sample = self._weight().sample(_SAMPLE)._replace(hessian=None, shortlist=1)
        return solve(sample, global_scale).error

    def _solved_error(self, global_scale: Tensor) -> float:
        solution = self._solved(global_scale)
        if self._weight().hessian is None:
            return solution.error
        return error_of(self._weight(), solution.scale, solution.zero_point, global_scale)

    def _minmax_error(self, global_scale: Tensor) -> float:
        problem = self._weight()
        minmax = safe_qparams(problem.low, problem.high, self.args, global_scale)
        return error_of(problem, *minmax, global_scale)

    @guarded
    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._problem = None
        self._forget_results()

    def _forget_results(self) -> None:
        for name in OptimalObserver.reductions:
            if name in self.fields():
                delattr(self, name)
        self._solutions.clear()
        self._errors.clear()


def _total(
    observers: Sequence[OptimalObserver],
    error: Callable[[OptimalObserver, Tensor], float],
    global_scale: Tensor,
) -> float:
    """Sum an error exactly: whoever asks, in whatever order, comes to the same choice."""
    key = error.__name__, float(global_scale)
    for observer in observers:
        if key not in observer._errors:
            observer._errors[key] = error(observer, global_scale)
    return math.fsum(observer._errors[key] for observer in observers)


def _version(weight: Tensor) -> int | None:
    """Return how often a tensor was changed in place; tensors made for inference do not know."""
    return None if weight.is_inference() else weight._version
