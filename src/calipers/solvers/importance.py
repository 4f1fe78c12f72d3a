"""How errors of a weight count: alike, by E[x²] of its inputs, or by E[x xᵀ].

An importance names the statistic of the inputs that it needs, and turns it into the weights of a
problem. A new one is a class, and a line in ``IMPORTANCES`` or an entry point of a package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import AfterValidator
from torch import Tensor

from calipers.errors import ImportanceError, ImportanceUnsupportedError
from calipers.numerics.layout import Layout, shared_columns, strategy_name
from calipers.registry import Registry
from calipers.statistics.base import Statistic
from calipers.statistics.sums import (
    BlockHessians,
    NonFinite,
    PairedHessians,
    SquareSums,
    block_width,
    shrunk,
)


class Weights(NamedTuple):
    """What the errors of a problem are weighed by.

    :param diagonal: over their mean; broadcasts with the pieces. None: all errors count alike
    :param hessian: blocks of shape (blocks, width, width) along the columns; None: no block
    """

    diagonal: Tensor | None = None
    hessian: Tensor | None = None


class ImportanceTarget(NamedTuple):
    """The weight whose errors are to count by an importance.

    :param label: what messages call it
    :param least: the least that a column counts, where the mean is 1
    """

    pieces: Tensor
    layout: Layout
    label: str
    least: float = 0.0


@dataclass(frozen=True)
class Importance:
    """All errors count alike; nothing is needed.

    :param nonfinite: what becomes of NaN and Inf among the inputs
    """

    nonfinite: NonFinite = "raise"
    name: ClassVar[str] = "none"
    kind: ClassVar[type[Statistic] | None] = None
    uses_products: ClassVar[bool] = False
    """Whether errors count by products of channels: solving multiplies large matrices."""
    uses_quantized_inputs: ClassVar[bool] = False
    """Whether inputs are needed as they become when layers before are quantized."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the statistic."""
        return () if self.kind is None else tuple(self.kind.all_reductions())

    @property
    def published(self) -> tuple[str, ...]:
        """The attributes of a module in which an earlier run may have left them."""
        return self.fields

    def statistic(self, columns: int | None, args: QuantizationArgs) -> Statistic | None:  # noqa: ARG002
        """Return an empty statistic of the inputs; None where none is needed.

        :param columns: of the weight; None where they are not known before it is filled
        """
        return None

    def weights(self, inputs: Statistic | None, of: ImportanceTarget) -> Weights:  # noqa: ARG002
        """Return what errors are weighed by; raise where that cannot be."""
        return Weights()

    def part_of(self, hessian: Tensor, tokens: int, args: QuantizationArgs) -> Statistic | None:  # noqa: ARG002
        """Return its statistic, read from Σ x xᵀ of all channels; None where none is needed."""
        return None


@dataclass(frozen=True)
class DiagonalImportance(Importance):
    """The error of a column counts by E[x²] of its input."""

    name: ClassVar[str] = "imatrix"
    kind: ClassVar[type[Statistic] | None] = SquareSums

    def statistic(self, columns: int | None, args: QuantizationArgs) -> Statistic | None:  # noqa: ARG002
        """Return empty sums of x²."""
        return SquareSums(nonfinite=self.nonfinite)

    def part_of(self, hessian: Tensor, tokens: int, args: QuantizationArgs) -> Statistic | None:
        """Return the diagonal."""
        return _filled(self.statistic(len(hessian), args), hessian.diagonal(), tokens)

    def weights(self, inputs: Statistic | None, of: ImportanceTarget) -> Weights:
        """Return E[x²] of each column over its mean."""
        total, count = _gathered(inputs, self.fields, of.label)
        return Weights(_diagonal(total / count, of))


@dataclass(frozen=True)
class HessianImportance(Importance):
    """The errors of a row count by E[x xᵀ] of their inputs, within blocks of neighbours."""

    name: ClassVar[str] = "hessian"
    kind: ClassVar[type[Statistic] | None] = BlockHessians
    uses_products: ClassVar[bool] = True

    def statistic(self, columns: int | None, args: QuantizationArgs) -> Statistic | None:
        """Return empty sums of x xᵀ, in blocks that fit the pieces."""
        width = None if columns is None else block_width(columns, shared_columns(args) or columns)
        return BlockHessians(width, nonfinite=self.nonfinite)

    def part_of(self, hessian: Tensor, tokens: int, args: QuantizationArgs) -> Statistic | None:
        """Return the blocks on the diagonal."""
        statistic = self.statistic(len(hessian), args)
        assert isinstance(statistic, BlockHessians)
        assert statistic.width is not None
        starts = range(0, len(hessian), statistic.width)
        blocks = [hessian[i : i + statistic.width, i : i + statistic.width] for i in starts]
        return _filled(statistic, torch.stack(blocks), tokens)

    def weights(self, inputs: Statistic | None, of: ImportanceTarget) -> Weights:
        """Return the diagonal of E[x xᵀ] over its mean, and its blocks over the same."""
        sums, count = _gathered(inputs, self.fields, of.label)
        squares = sums.diagonal(dim1=1, dim2=2).flatten() / count
        diagonal = _diagonal(squares, of)
        blocks = sums / count / float(squares.mean())
        width, piece = blocks.shape[-1], of.pieces.shape[-1]
        if of.layout.order is not None:
            raise ImportanceError(
                "a Hessian is of neighbouring columns, which g_idx tears apart", where=of.label
            )
        if not bool(torch.isfinite(blocks).all()):
            raise ImportanceError("the Hessian has NaN or Inf in it", where=of.label)
        padded = -blocks.shape[0] * width % piece  # columns of a block that no matrix fills
        if (width % piece and piece % width) or padded % width:
            raise ImportanceError(
                f"the Hessian has blocks of {width} columns, which do not fit pieces of {piece} "
                "columns",
                where=of.label,
                hint="Gather it with this observer",
            )
        fill = blocks.new_zeros(padded // width, width, width)
        return Weights(diagonal, torch.cat([shrunk(blocks, int(count)), fill]))


@dataclass(frozen=True)
class FullHessian(Importance):
    """E[x xᵀ] of all channels, for error feedback; the others are parts of it."""

    name: ClassVar[str] = "full_hessian"
    kind: ClassVar[type[Statistic] | None] = BlockHessians
    uses_products: ClassVar[bool] = True

    @property
    def published(self) -> tuple[str, ...]:
        """Nothing: what other observers leave on a module are blocks."""
        return ()

    def statistic(self, columns: int | None, args: QuantizationArgs) -> Statistic | None:  # noqa: ARG002
        """Return empty sums of x xᵀ in one block."""
        return BlockHessians(columns, nonfinite=self.nonfinite)


@dataclass(frozen=True)
class PairedHessian(FullHessian):
    """E[y yᵀ] and E[x yᵀ] of inputs x as they were and y as they have become."""

    name: ClassVar[str] = "paired_hessian"
    kind: ClassVar[type[Statistic] | None] = PairedHessians
    uses_quantized_inputs: ClassVar[bool] = True

    def statistic(self, columns: int | None, args: QuantizationArgs) -> Statistic | None:  # noqa: ARG002
        """Return empty sums of all."""
        assert columns is not None, "the channels of a pair are not known"
        return PairedHessians(columns, nonfinite=self.nonfinite)


IMPORTANCES: Registry[type[Importance]] = Registry(
    "importance",
    "calipers.importances",
    {
        "none": "calipers.solvers.importance:Importance",
        "imatrix": "calipers.solvers.importance:DiagonalImportance",
        "hessian": "calipers.solvers.importance:HessianImportance",
    },
    base=Importance,
)
"""All of them, by the name they have in options."""


def _known_importance(name: str) -> str:
    if name not in IMPORTANCES:
        *names, last = map(repr, IMPORTANCES.names())
        raise ValueError(f"must be {', '.join(names)} or {last}, got {name!r}")
    return name


ImportanceName = Annotated[str, AfterValidator(_known_importance), IMPORTANCES]


def importance_named(name: str, nonfinite: NonFinite = "raise") -> Importance:
    """Return an importance by its name.

    >>> importance_named("imatrix").fields
    ('_imatrix_sum', '_imatrix_count')
    """
    return IMPORTANCES.get(name)(nonfinite)


def _filled(statistic: Statistic | None, total: Tensor, tokens: int) -> Statistic:
    assert statistic is not None
    count = torch.tensor(tokens, device=total.device)
    statistic.load_fields(dict(zip(statistic.declared(), (total, count), strict=True)))
    return statistic


def _gathered(inputs: Statistic | None, fields: tuple[str, ...], label: str) -> tuple[Tensor, ...]:
    """Return a sum and the number of its tokens."""
    held = {} if inputs is None else inputs.fields()
    total, count = (held.get(name) for name in fields)
    if total is None or count is None or not int(count):
        raise ImportanceError("no importance was gathered", where=label)
    return total, count


def _diagonal(mean: Tensor, of: ImportanceTarget) -> Tensor:
    """Lay E[x²] of each column over its mean, over the pieces; refuse what cannot be one."""
    columns = of.layout.columns_of(of.pieces, mean.numel())
    if columns is None:
        raise ImportanceUnsupportedError(
            f"importance has no meaning for a weight without columns, cut by strategy "
            f"'{strategy_name(of.layout.args)}'",
            where=of.label,
        )
    problem = None
    if mean.numel() != columns:
        problem = f"has {mean.numel()} channels for {columns} columns of the weight"
    elif not bool(torch.isfinite(mean).all()):
        problem = "has NaN or Inf in it"
    elif bool((mean < 0).any()):
        problem = "has negative values"
    elif not bool(mean.any()):
        problem = "is zero for every channel"
    if problem is not None:
        raise ImportanceError(f"importance {problem}", where=of.label)
    diagonal = mean / mean.mean()
    return of.layout.over_columns(diagonal.clamp(min=of.least) if of.least else diagonal)
