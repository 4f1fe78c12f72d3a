"""How often each value of a stream occurred: the statistic that forgets nothing but the order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import MergeError
from calipers.kernels.reductions import BINS, count_values
from calipers.numerics.layout import Layout, strategy_name
from calipers.numerics.tensors import as_float
from calipers.statistics.base import Form, Reduction, Statistic, TensorSummary, guarded

TABLES = {"counts_bfloat16": torch.bfloat16, "counts_float16": torch.float16}


class Distribution(NamedTuple):
    """The distinct finite values of a piece, float32 and ascending, and how often each occurred."""

    values: Tensor
    counts: Tensor


class ValueCounts(Statistic):
    """Counts each of the 65,536 values of a 16-bit float, exactly; wider floats as bfloat16.

    Each dtype has a table of its own, so that a stream may have both. NaN and Inf have bins like
    any value, but no place in a distribution. A table grows in place if this statistic made it;
    one that came by merging, loading or synchronisation is copied first.

    :param base_name: what is counted: ``input``, ``output``, ``q``, ``k`` or ``v``
    :param strategy: whether the values of the whole tensor are counted together, or of each head

    >>> seen = ValueCounts()
    >>> seen.update(torch.tensor([[1.0, -0.0, 0.0, 3.14159]]))
    >>> [part.tolist() for part in next(seen.distributions())]
    [[0.0, 1.0, 3.140625], [2, 1, 1]]
    >>> seen.num_tokens, seen.is_exact
    (1, False)
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        **dict.fromkeys(TABLES, Reduction.SUM),
        "observed_counted": Reduction.SUM,
        "observed_counted_like": Reduction.SUM,
    }
    tokens_field = "observed_counted"
    forms: ClassVar[Mapping[str, Form]] = {"observed_counted_like": Form.DTYPE}
    configured_by = ("base_name", "strategy")
    counts_bfloat16: Tensor
    counts_float16: Tensor
    observed_counted: Tensor  # tokens
    observed_counted_like: Tensor  # no elements, only the dtype; adding two promotes it

    def __init__(self, base_name: str = "input", strategy: str = "tensor") -> None:
        self._args = QuantizationArgs(num_bits=8, strategy=strategy)
        self.base_name, self.strategy = base_name, strategy_name(self._args)
        self._own: dict[str, Tensor] = {}  # the tables that nobody else holds

    def problem_with(self, fields: Mapping[str, Tensor]) -> str | None:
        """Say why it cannot have these fields, which are sound each, if it cannot."""
        return None if TABLES.keys() & fields.keys() else f"it lacks {', '.join(TABLES)}"

    def expected_bytes(self, channels: int, heads: int = 1) -> int:  # noqa: ARG002
        """Estimate the memory it takes: a table for the tensor, or for each head."""
        return 8 * BINS * (heads if self.strategy == "attn_head" else 1)

    @property
    def is_exact(self) -> bool:
        """Whether values were counted as they are, not rounded to bfloat16."""
        like: Tensor | None = self.fields().get("observed_counted_like")
        return like is not None and like.dtype.itemsize == 2

    @torch.no_grad()
    @guarded
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in a tensor, in the shape it has in the model; ``mask`` says which tokens count."""
        layout = Layout.of(self.base_name, self._args)
        x = x if mask is None else layout.select_tokens(x, mask)
        if x.numel():
            self.count(layout.pieces(as_float(x)), layout.tokens(x))

    @guarded
    def count(self, pieces: Tensor, tokens: int) -> None:
        """Count the values of pieces, (observations, *qparam_shape, rows, columns)."""
        count_values(pieces, into=self._own_table(pieces, pieces.shape[1:-2]))
        self.absorb(
            observed_counted=torch.tensor(tokens, device=pieces.device),
            observed_counted_like=pieces.new_empty(0),
        )

    @property
    def takes_summaries(self) -> bool:
        """Whether summaries of finite tensors, made for several statistics, are enough for it."""
        return self.base_name in ("input", "output") and self.strategy == "tensor"

    def take(self, summary: TensorSummary) -> None:
        """Take in the tensors of a summary, whose counts are in their table already."""
        self.absorb(observed_counted=summary.tokens, observed_counted_like=summary.like)

    @guarded
    def table_for(self, x: Tensor) -> Tensor:
        """Return the table that whoever summarizes ``x`` adds its counts to."""
        return self._own_table(x, (1,))

    @guarded
    def distributions(self) -> Iterator[Distribution]:
        """Give the distribution of each piece, in the order of the qparams; both dtypes in one."""
        tables = {
            dtype: getattr(self, name).reshape(-1, BINS).cpu()
            for name, dtype in TABLES.items()
            if name in self.fields()
        }
        distributions = []
        for rows in zip(*tables.values(), strict=True):
            values, counts = [], []
            for row, dtype in zip(rows, tables, strict=True):
                bins = row.nonzero().squeeze(1)
                occurring = bins.to(torch.int32).to(torch.int16).view(dtype).float() + 0.0  # no −0
                finite = torch.isfinite(occurring)
                values.append(occurring[finite])
                counts.append(row[bins[finite]])
            distinct, places = torch.unique(torch.cat(values), return_inverse=True)
            total = torch.cat(counts)
            summed = total.new_zeros(len(distinct)).index_add_(0, places, total)
            distributions.append(Distribution(distinct, summed))
        return iter(distributions)

    def square_sum(self) -> Tensor:
        """Return Σx² of all finite values, in float64."""
        parts = [(d.values.double().square() * d.counts).sum() for d in self.distributions()]
        return torch.stack(parts).sum()

    @guarded
    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._own.clear()

    @guarded
    def fields_to_share(self) -> dict[str, Tensor]:
        """Return the fields for somebody else to keep: tables are copied before they grow again."""
        self._own.clear()
        return super().fields_to_share()

    def packed(self, name: str, value: Tensor) -> Tensor:
        """Save a table as the bins that are not empty and their counts, int64 of shape (2, n)."""
        if name not in TABLES:
            return value
        flat = value.flatten()
        bins = flat.nonzero().squeeze(1)
        return torch.stack([bins, flat[bins]])

    def unpacked(self, name: str, saved: Tensor, shape: Sequence[int]) -> Tensor:
        """Lay out a saved table again; refuse one that cannot have been saved."""
        if name not in TABLES:
            return saved
        problem = _problem(saved, shape)
        if problem:
            raise MergeError(
                f"cannot load '{name}': {problem}. Nothing was loaded",
                subject=self.label(),
                hint="The file is damaged; save it again from the observer that gathered it",
            )
        bins, counts = saved
        table = torch.zeros(math.prod(shape), dtype=torch.int64, device=saved.device)
        return table.index_copy_(0, bins, counts).reshape(*shape)

    def _own_table(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the table of the dtype of values, with a row for each of so many pieces."""
        name = "counts_float16" if values.dtype == torch.float16 else "counts_bfloat16"
        held: Tensor | None = getattr(self, name, None)
        if held is not None and held is self._own.get(name) and held.device == values.device:
            return held
        with torch.inference_mode(False):  # a table made for inference could not grow afterwards
            if held is None:
                table = torch.zeros((*shape, BINS), dtype=torch.int64, device=values.device)
            else:
                table = held.to(values.device, copy=True).contiguous()
        setattr(self, name, table)
        self._own[name] = table
        return table


def _problem(saved: Tensor, shape: Sequence[int]) -> str | None:
    """Say what is wrong with a packed table, if anything is."""
    if not shape or shape[-1] != BINS:
        return f"its shape is said to be {tuple(shape)}, which does not end in {BINS}"
    if saved.dtype != torch.int64 or saved.ndim != 2 or len(saved) != 2:
        return (
            f"bins and counts must be int64 of shape (2, n), not {saved.dtype} {tuple(saved.shape)}"
        )
    bins, counts = saved
    if bool((bins < 0).any() or (bins >= math.prod(shape)).any() or (bins.diff() <= 0).any()):
        return f"its bins must ascend within [0, {math.prod(shape)})"
    if bool((counts <= 0).any()):
        return "its counts must be positive"
    return None
