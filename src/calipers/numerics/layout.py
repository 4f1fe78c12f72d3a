"""How a tensor is cut into the pieces that share one scale.

Everything above this module sees one canonical view, ``(observations, *qparam_shape, group)``:
reduce it over its first and last dimension and what is left has the shape of the scale. A stack of
weights, such as the experts of a layer, has its leading dimensions in front of that shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor

from calipers.errors import ConfigurationError, LayoutError, sizes_that_divide
from calipers.numerics.tensors import checked_mask

_WEIGHT = ("tensor", "channel", "group", "tensor_group", "block")
_ACTIVATION = ("tensor", "group", "tensor_group", "token")
_ATTENTION = ("tensor", "attn_head")

STRATEGIES = {
    "weight": _WEIGHT,
    "input": _ACTIVATION,
    "output": _ACTIVATION,
    "q": _ATTENTION,
    "k": _ATTENTION,
    "v": _ATTENTION,
}
"""The strategies that each kind of tensor can be cut by."""

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


def granularity_name(args: QuantizationArgs) -> str:
    """Return the strategy, with the size of its groups or blocks.

    >>> granularity_name(QuantizationArgs(strategy="block", block_structure=[128, 64]))
    'block 128x64'
    """
    if args.block_structure:
        return f"{strategy_name(args)} " + "x".join(map(str, args.block_structure))
    width = shared_columns(args)
    return strategy_name(args) if width is None else f"{strategy_name(args)} {width}"


def shared_columns(args: QuantizationArgs) -> int | None:
    """Return how many neighbouring columns share a scale; ``None`` where all columns do.

    >>> shared_columns(QuantizationArgs(strategy="group", group_size=128))
    128
    """
    width = args.block_structure[1] if args.block_structure else args.group_size
    return width if width is not None and width > 0 else None


def indivisible_by(size: int, args: QuantizationArgs) -> int | None:
    """Return the width of groups or blocks if it does not divide a dimension of this size.

    >>> args = QuantizationArgs(strategy="group", group_size=128)
    >>> indivisible_by(96, args), indivisible_by(256, args)
    (128, None)
    """
    width = shared_columns(args)
    return None if width is None or size % width == 0 else width


def scale_shape(shape: Sequence[int], args: QuantizationArgs) -> tuple[int, ...] | None:
    """Return the shape of the scales of a weight; ``None`` where a weight has no such scales.

    >>> scale_shape((256, 300), QuantizationArgs(strategy="block", block_structure=[128, 128]))
    (2, 3)
    """
    *rows, columns = shape
    width = shared_columns(args) or columns
    strategy = strategy_name(args)
    if strategy not in _WEIGHT:
        return None
    if strategy == "tensor":
        return (1,)
    if strategy == "channel":
        return (*rows, 1)
    rows[-1] = -(-rows[-1] // block_height(args))
    return (*rows, -(-columns // width))


def block_height(args: QuantizationArgs) -> int:
    """Return how many rows of a weight a block has; 1 where scales are not those of blocks."""
    height: int = args.block_structure[0] if args.block_structure else 1
    return height


def row_tiles(shape: Sequence[int], args: QuantizationArgs, tile: int) -> Iterator[slice]:
    """Cut the rows of a weight into tiles of about so many numbers, and not through blocks."""
    rows, columns = shape
    height = block_height(args)
    step = height * max(1, tile // max(1, height * columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def scale_rows(scale: Tensor, rows: slice, args: QuantizationArgs) -> Tensor:
    """Return the scales, or zero points, of some rows of a weight, which begin with a block."""
    if strategy_name(args) == "tensor":
        return scale
    height = block_height(args)
    return scale[rows.start // height : -(-rows.stop // height)]


def has_few_scales(args: QuantizationArgs) -> bool:
    """Whether a tensor has so few scales, however large it is, that values are counted for each."""
    return args.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.ATTN_HEAD)


def has_global_scale(args: QuantizationArgs) -> bool:
    """Whether local scales are stored under one scale of the whole tensor."""
    return bool(args.strategy == QuantizationStrategy.TENSOR_GROUP)


def flatten_for_calibration(value: Tensor, base_name: str, args: QuantizationArgs) -> Tensor:
    """Bring a weight, activation or attention state into the canonical view.

    >>> args = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    >>> flatten_for_calibration(torch.zeros(8, 96), "weight", args).shape
    torch.Size([1, 8, 3, 32])
    """
    return Layout.of(base_name, args).view(value)


@dataclass(frozen=True, eq=False)
class Layout:
    """The cut of one kind of tensor by one strategy; ``order`` permutes a weight's columns."""

    base_name: str
    args: QuantizationArgs
    order: Tensor | None = None

    @classmethod
    def of(cls, base_name: str, args: QuantizationArgs, g_idx: Tensor | None = None) -> Layout:
        """Check that the strategy suits the tensor, and how ``g_idx`` maps columns to groups.

        A ``g_idx`` with ``-1`` in it stands for the order that the columns already have.
        """
        check_base_name(base_name)
        if args.strategy not in STRATEGIES[base_name]:
            raise LayoutError(
                f"Strategy '{strategy_name(args)}' cannot be applied to '{base_name}'",
                allowed=STRATEGIES[base_name],
            )
        if g_idx is None or bool((g_idx == -1).any()):
            return cls(base_name, args)
        if base_name != "weight" or args.strategy not in _GROUPED:
            raise LayoutError(
                "g_idx maps a weight's columns to groups: it has no meaning for "
                f"'{base_name}' with strategy '{strategy_name(args)}'"
            )
        sizes = torch.unique(g_idx, return_counts=True)[1]
        if bool((sizes != args.group_size).any()):
            raise LayoutError(
                f"g_idx must name each group {args.group_size} times (group_size); its groups have "
                f"from {int(sizes.min())} to {int(sizes.max())} columns"
            )
        return cls(base_name, args, torch.argsort(g_idx, stable=True))

    def view(self, value: Tensor) -> Tensor:
        """Bring ``value`` into the canonical view, without a copy where strides allow it."""
        return self.pieces(value).flatten(-2)

    def pieces(self, value: Tensor) -> Tensor:
        """Cut ``value`` as the canonical view does, but leave the rows of a piece apart.

        The shape is (observations, *qparam_shape, rows, columns). That is a view of any matrix,
        also where its blocks or a transposed memory make the canonical view a copy.
        """
        if self.base_name == "weight":
            return self._weight(value)
        if value.ndim == 0:
            raise LayoutError(
                "must have at least one dimension", subject=f"'{self.base_name}'", got="a scalar"
            )
        if self.base_name in ("input", "output"):
            return self._activation(value).unsqueeze(-2)
        return self._attention(value).unsqueeze(-2)

    def over_columns(self, value: Tensor) -> Tensor:
        """Lay one value per input column over the pieces of a weight; it broadcasts with them."""
        if self.args.strategy in _GROUPED:
            return self._grouped(self._ordered(value)).unsqueeze(-2)
        if self.args.strategy == QuantizationStrategy.BLOCK:
            width = self.args.block_structure[1]
            padding = value.new_zeros(-len(value) % width)
            return torch.cat([value, padding]).reshape(-1, 1, width)
        return value

    def columns_of(self, pieces: Tensor, expected: int) -> int | None:
        """Count the columns of the weight that was cut into pieces; ``None`` if it had none.

        Blocks may be padded: then any number between is as good as the ``expected`` one.
        """
        if self.args.strategy == QuantizationStrategy.TENSOR:
            has_rows = pieces.shape[-2] > 1 or pieces.shape[-1] == expected
            return pieces.shape[-1] if has_rows else None
        columns = pieces.shape[-3] * pieces.shape[-1]
        if self.args.strategy == QuantizationStrategy.BLOCK:
            return min(max(expected, columns - pieces.shape[-1] + 1), columns)
        return columns

    def groups(self, columns: int) -> Tensor:
        """Number, for each column of a weight, the groups of columns that share a scale."""
        width = shared_columns(self.args) or max(columns, 1)
        return torch.arange(columns) // width

    def by_rows(self, value: Tensor, rows: int) -> Tensor:
        """Lay scales or zero points over the rows of a weight: (rows or 1, groups of columns)."""
        if self.args.strategy == QuantizationStrategy.TENSOR:
            return value.reshape(1, 1)
        if self.args.strategy == QuantizationStrategy.BLOCK:
            return value.repeat_interleave(self.args.block_structure[0], 0)[:rows]
        return value.reshape(rows, -1)

    def rows_per_scale(self, rows: int) -> int:
        """Return how many of so many rows of a weight share a scale."""
        if self.args.strategy == QuantizationStrategy.TENSOR:
            return rows
        return block_height(self.args)

    def from_rows(self, value: Tensor) -> Tensor:
        """Undo ``by_rows``: one row of scales or zero points for all that share them."""
        return value[:: self.rows_per_scale(len(value))]

    def tokens(self, value: Tensor) -> int:
        """Count the tokens of an activation or attention state."""
        if self.base_name in ("q", "k", "v"):
            return value.shape[0] * value.shape[2]
        # First-generation code observes activations without saying so: a 3-D "weight" that is not
        # cut along its channels is one.
        whole = self.args.strategy == QuantizationStrategy.TENSOR
        if self.base_name == "weight" and not (whole and value.ndim > 2):
            return 0
        return math.prod(value.shape[:-1])

    def select_tokens(self, value: Tensor, mask: Tensor) -> Tensor:
        """Keep the tokens that ``mask`` marks: one entry per token, zero or False for "leave out".

        What comes back is an activation of shape (tokens, hidden) or attention states of shape
        (tokens, heads, 1, head_dim): batch and sequence are no longer told apart.
        """
        if self.base_name == "weight":
            raise LayoutError("A mask says which tokens count: it cannot be applied to a weight")
        if self.args.strategy == QuantizationStrategy.TOKEN:
            raise LayoutError("With strategy 'token' each position has a scale: it takes no mask")
        by_token = value.transpose(1, 2) if self.base_name in ("q", "k", "v") else value
        dims = 2 if self.base_name in ("q", "k", "v") else value.ndim - 1
        kept = by_token[checked_mask(mask, by_token, self.base_name, dims)]
        return kept.unsqueeze(2) if self.base_name in ("q", "k", "v") else kept

    def _weight(self, value: Tensor) -> Tensor:
        if self.args.strategy == QuantizationStrategy.TENSOR:
            rows, columns = value.shape if value.ndim == 2 else (1, value.numel())
            return value.reshape(1, 1, rows, columns)
        is_block = self.args.strategy == QuantizationStrategy.BLOCK
        if value.ndim < 2 or (is_block and value.ndim > 2):
            raise LayoutError(
                f"Strategy '{strategy_name(self.args)}' needs a weight of two dimensions",
                got=f"shape {tuple(value.shape)}",
                hint="Observe a stack of matrices one by one" if value.ndim > 2 else "",
            )
        if self.args.strategy == QuantizationStrategy.CHANNEL:
            return value.view(1, *value.shape[:-1], 1, 1, value.shape[-1])
        if self.args.strategy in _GROUPED:
            return self._grouped(self._ordered(value))[None].unsqueeze(-2)
        height, width = self.args.block_structure
        rows, columns = value.shape
        below, beside = -rows % height, -columns % width
        if below or beside:
            value = torch.constant_pad_nd(value, (0, beside, 0, below))
            rows, columns = value.shape
        blocks = value.reshape(1, rows // height, height, columns // width, width)
        return blocks.transpose(2, 3)

    def _activation(self, value: Tensor) -> Tensor:
        if self.args.strategy == QuantizationStrategy.TOKEN:
            return value if value.ndim > 1 else value.unsqueeze(0)
        tokens = value.reshape(-1, value.shape[-1])
        if self.args.strategy == QuantizationStrategy.TENSOR:
            return tokens.unsqueeze(1)
        return self._grouped(tokens)

    def _attention(self, value: Tensor) -> Tensor:
        if value.ndim != 4:
            raise LayoutError(
                "must have shape (batch, heads, sequence, head_dim)",
                subject=f"'{self.base_name}'",
                got=f"{tuple(value.shape)}",
            )
        tokens = value.transpose(1, 2).flatten(0, 1)
        if self.args.strategy == QuantizationStrategy.TENSOR:
            return tokens.flatten(1).unsqueeze(1)
        return tokens[:, :, None, None, :]

    def _ordered(self, value: Tensor) -> Tensor:
        if self.order is None:
            return value
        if self.order.numel() != value.shape[-1]:
            raise LayoutError(
                f"g_idx has {self.order.numel()} entries for {value.shape[-1]} columns"
            )
        return value.index_select(-1, self.order.to(value.device))

    def _grouped(self, value: Tensor) -> Tensor:
        size, group_size = value.shape[-1], self.args.group_size
        if indivisible_by(size, self.args):
            raise LayoutError(
                f"Strategy '{strategy_name(self.args)}' needs group_size to divide the last "
                f"dimension of '{self.base_name}': {size} is not divisible by {group_size}",
                hint=sizes_that_divide(size),
            )
        return value.reshape(*value.shape[:-1], size // group_size, group_size)


def strategy_name(args: QuantizationArgs) -> str:
    """Return the strategy as a plain word; compressed-tensors keeps an enum or a string."""
    return str(QuantizationStrategy(args.strategy).value)


def check_base_name(base_name: str) -> None:
    """Refuse the name of a tensor role that does not exist."""
    if base_name not in STRATEGIES:
        raise ConfigurationError(f"Unknown base_name {base_name!r}", allowed=list(STRATEGIES))


def as_grid(pieces: Tensor, *, ordered: bool = False) -> Tensor:
    """Bring pieces into five dimensions, of a grid with two, without a copy if possible.

    ``ordered`` keeps the order of the values within a piece, which most operations do not need.
    """
    pieces = pieces.detach()
    observations, *grid, rows, columns = pieces.shape
    last = grid[-1] if grid else 1
    five = pieces.reshape(observations, math.prod(grid[:-1]), last, rows, columns)
    if not ordered and rows > 1 and five.stride(-2) < five.stride(-1):
        return five.transpose(-1, -2)
    return five


def length_of(pieces: Tensor) -> int:
    """Return how many values a piece has."""
    return pieces.shape[0] * pieces.shape[-2:].numel()


def by_piece(pieces: Tensor) -> Tensor:
    """Bring pieces into the shape (pieces, values)."""
    return pieces.movedim(0, -3).flatten(-3).reshape(pieces.shape[1:-2].numel(), -1)
