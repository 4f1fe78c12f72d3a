"""The range of each piece of a stream: of the last tensor, of all, or a moving average."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from typing_extensions import Self

from calipers.errors import LayoutError, TensorKindError, not_finite
from calipers.kernels.reductions import Extrema as TensorExtrema
from calipers.kernels.reductions import extrema
from calipers.numerics.layout import Layout, granularity_name, shared_columns, strategy_name
from calipers.numerics.tensors import as_float
from calipers.statistics.base import Form, Reduction, Statistic, TensorSummary, guarded


class Observation(NamedTuple):
    """The tensor that is observed right now, cut into pieces.

    :param observed: what is handed on: the pieces themselves, or their canonical view
    """

    observed: Tensor
    pieces: Tensor
    layout: Layout
    extrema: TensorExtrema
    tokens: int

    @property
    def is_finite_nowhere(self) -> bool:
        """Whether every value is NaN or Inf."""
        return self.extrema.nonfinite == self.pieces.numel()

    def marks(self) -> dict[str, Tensor]:
        """Return what is remembered of any tensor: its dtype, tokens, and what was left out."""
        like = {"observed_like": self.pieces.new_empty(0)}
        if not self.tokens and not self.extrema.nonfinite:  # as of most weights
            return like
        tokens = torch.full((), self.tokens, device=self.pieces.device)
        return {"observed_tokens": tokens, **self.left_out(), **like}

    def left_out(self) -> dict[str, Tensor]:
        """Return how many values were not finite."""
        count, device = self.extrema.nonfinite, self.pieces.device
        return {"observed_nonfinite": torch.full((), count, device=device)}

    def canonical_view(self) -> Tensor:
        """Return the pieces as (observations, *qparam_shape, group); what is not finite is zero.

        Zero is in every range and quantizes without error: it adds nothing to a result.
        """
        view = self.pieces.flatten(-2)
        return view.nan_to_num(0.0, 0.0, 0.0) if self.extrema.nonfinite else view

    def without_missing(self, low: Tensor, high: Tensor) -> Observation:
        """Let pieces without any finite value have the range they had before."""
        missing, extrema = self.extrema.missing, self.extrema
        if missing is None or low.shape != extrema.min_vals.shape:
            return self
        low, high = low.to(extrema.min_vals), high.to(extrema.max_vals)
        kept = extrema._replace(
            min_vals=torch.where(missing, low, extrema.min_vals),
            max_vals=torch.where(missing, high, extrema.max_vals),
        )
        return self._replace(extrema=kept)


def observation_of(
    value: Tensor,
    base_name: str,
    args: QuantizationArgs,
    *,
    g_idx: Tensor | None = None,
    mask: Tensor | None = None,
    nonfinite: str = "raise",
    label: Callable[[], str],
) -> Observation | None:
    """Cut a tensor into pieces, and find their extrema; None if nothing of it counts.

    :param nonfinite: whether NaN and Inf are an error (``raise``), or left out
    :param label: what messages call the one who observes
    """
    if value.numel() == 0:
        return None
    if value.is_complex():
        raise TensorKindError(
            f"was given a complex tensor ({value.dtype})",
            subject=label(),
            hint="Observe its real and imaginary parts separately, or exclude the module",
        )
    value = value.detach()  # takes less time than to switch gradients off
    try:
        layout = Layout.of(base_name, args, g_idx)
        if mask is not None:
            value = layout.select_tokens(value, mask)
            if value.numel() == 0:
                return None
        pieces = layout.pieces(as_float(value))
    except LayoutError as error:
        error.add_place(label())
        raise
    found = extrema(pieces)
    if found.nonfinite and nonfinite == "raise":
        raise not_finite(label(), found.nonfinite, value.numel(), value.shape)
    return Observation(pieces, pieces, layout, found, layout.tokens(value))


_WHOLE = QuantizationArgs(num_bits=8, strategy="tensor")
_SUMMARIZED = ("tensor", "group 1")
"""The cuts whose extrema a summary has: the whole tensor, and each channel by itself."""


class RangeChoice(Protocol):
    """Chooses the range of one tensor, in place of its extrema."""

    def __call__(self, seen: Observation) -> tuple[Tensor, Tensor]:
        """Return the ends of the range of each piece."""

    def configuration(self) -> dict[str, Any]:
        """Return what two have in common that choose the same."""


class LastRange(Statistic):
    """The extrema of the last tensor, and how much was seen.

    :param base_name: what is measured: ``weight``, ``input``, ``output``, ``q``, ``k`` or ``v``
    :param args: how it is cut into pieces
    :param nonfinite: whether NaN and Inf are an error (``raise``), or left out (``ignore``)
    :param choice: chooses another range of each tensor than its extrema
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "min_vals": Reduction.LAST,
        "max_vals": Reduction.LAST,
        "observed_tokens": Reduction.SUM,
        "observed_nonfinite": Reduction.SUM,
        "observed_like": Reduction.SUM,
    }
    tokens_field = "observed_tokens"
    forms: ClassVar[Mapping[str, Form]] = {
        "min_vals": Form.RANGE,
        "max_vals": Form.RANGE,
        "observed_nonfinite": Form.COUNT,
        "observed_like": Form.DTYPE,
    }
    min_vals: Tensor
    max_vals: Tensor
    observed_tokens: Tensor
    observed_nonfinite: Tensor
    observed_like: Tensor  # no elements, only the dtype; adding two of them promotes it

    settings: ClassVar[tuple[str, ...]] = ()
    """What it is told beside: names of options of an observer that holds it."""

    def __init__(
        self,
        base_name: str = "input",
        args: QuantizationArgs = _WHOLE,
        *,
        nonfinite: str = "raise",
        choice: RangeChoice | None = None,
    ) -> None:
        self.base_name, self.args, self.nonfinite, self.choice = base_name, args, nonfinite, choice

    def configuration(self) -> dict[str, Any]:
        """Return what two statistics have in common that measure the same of a tensor."""
        # Files of measurements hold this. It is spelled out, since what compressed-tensors dumps of
        # its arguments differs from version to version.
        return {
            **super().configuration(),
            "base_name": self.base_name,
            "group_size": self.args.group_size,
            "strategy": strategy_name(self.args),
            "block_structure": self.args.block_structure,
            "nonfinite": self.nonfinite,
            **({"choice": self.choice.configuration()} if self.choice else {}),
        }

    @guarded
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in a tensor, in the shape it has in the model; ``mask`` says which tokens count."""
        seen = observation_of(
            x, self.base_name, self.args, mask=mask, nonfinite=self.nonfinite, label=self.label
        )
        if seen is None:
            return
        if seen.is_finite_nowhere:
            self.absorb(**seen.left_out())
            return
        if "min_vals" in self.fields():
            seen = seen.without_missing(self.min_vals, self.max_vals)
        found = seen.extrema
        low, high = self.choice(seen) if self.choice else (found.min_vals, found.max_vals)
        self.absorb(min_vals=low, max_vals=high, **seen.marks())

    def range(self) -> tuple[Tensor, Tensor] | None:
        """Return the range of each piece in the dtype of what was seen; None where nothing was."""
        fields = self.fields()
        if "min_vals" not in fields:
            return None
        low, high = fields["min_vals"], fields["max_vals"]
        dtype = fields.get("observed_like", low).dtype
        return low.to(dtype), high.to(dtype)


class Extrema(LastRange):
    """The extrema of all tensors.

    >>> seen = Extrema()
    >>> seen.update(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    >>> seen.update(torch.tensor([[-1.0, 2.0], [9.0, 0.0]]), torch.tensor([True, False]))
    >>> float(seen.min_vals), float(seen.max_vals), seen.num_tokens
    (-1.0, 3.0, 3)
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "min_vals": Reduction.MIN,
        "max_vals": Reduction.MAX,
    }

    @classmethod
    def from_configuration(cls, options: Mapping[str, Any]) -> Self:
        """Return an empty statistic of a configuration, which is given without the class."""
        cut = {
            key: value for key, value in options.items() if key not in ("base_name", "nonfinite")
        }
        args = QuantizationArgs(num_bits=8, **cut)
        return cls(options["base_name"], args, nonfinite=options["nonfinite"])

    def problem_with(self, fields: Mapping[str, Tensor]) -> str | None:
        """Say why it cannot have these fields, which are sound each, if it cannot."""
        low, high = fields["min_vals"], fields["max_vals"]
        if low.shape != high.shape or bool((low > high).any()):
            return "min_vals must be as many as max_vals, and none above its maximum"
        return None

    @property
    def can_be_divided(self) -> bool:
        """Whether it is known what it would be had each channel been divided by a factor."""
        return shared_columns(self.args) == 1

    def divided_by(self, factors: Tensor) -> Self | None:
        """Return the extrema had each channel been divided by a positive factor."""
        if not self.can_be_divided:
            return None
        fields = self.fields()
        for name in ("min_vals", "max_vals"):
            if name in fields:
                fields[name] = fields[name] / factors.to(fields[name])
        return self.with_fields(fields)

    def derive_from(self, known: Collection[Statistic]) -> bool:
        """Take the extrema of groups, and of the whole, from those of single channels, too."""
        if super().derive_from(known):
            return True
        is_whole, width = strategy_name(self.args) == "tensor", shared_columns(self.args)
        for each in known:
            if not (is_whole or width) or not isinstance(each, Extrema):
                continue
            if each.base_name == self.base_name and shared_columns(each.args) == 1:
                fields = each.fields()  # the extrema of single channels
                if fields:
                    shape = (1, -1) if width is None else (-1, width)
                    fields["min_vals"] = fields["min_vals"].reshape(shape).amin(-1)
                    fields["max_vals"] = fields["max_vals"].reshape(shape).amax(-1)
                self.load_fields(fields)
                return True
        return False

    @property
    def takes_summaries(self) -> bool:
        """Whether summaries of finite tensors, made for several statistics, are enough for it."""
        is_hidden = self.base_name in ("input", "output")
        return is_hidden and granularity_name(self.args) in _SUMMARIZED

    def take(self, summary: TensorSummary) -> None:
        """Take in the tensors of a summary, as ``update`` would, one after the other."""
        low, high = summary.min_vals, summary.max_vals
        of_channels = self.args.group_size == 1
        self.absorb(
            min_vals=low if of_channels else low.amin(0, keepdim=True),
            max_vals=high if of_channels else high.amax(0, keepdim=True),
            observed_tokens=summary.tokens,
            observed_nonfinite=torch.zeros_like(summary.tokens),
            observed_like=summary.like,
        )


class MovingAverage(LastRange):
    """Averages ranges with exponentially falling weights; the first one is taken whole.

    What it keeps depends on the order of the batches, so it cannot merge. Ranks average theirs.

    :param averaging_constant: the weight of the newest range
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "min_vals": Reduction.MEAN,
        "max_vals": Reduction.MEAN,
    }
    settings = ("averaging_constant",)

    def __init__(self, *args: Any, averaging_constant: float = 0.01, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.averaging_constant = averaging_constant

    def configuration(self) -> dict[str, Any]:
        """Return what two statistics have in common that measure the same of a tensor."""
        return {**super().configuration(), "averaging_constant": self.averaging_constant}

    def combine(self, name: str, mine: Tensor, new: Tensor) -> Tensor:
        """Move an averaged field towards its new value, in float32 or better."""
        if self.declared()[name] is not Reduction.MEAN:
            return super().combine(name, mine, new)
        precise = torch.promote_types(new.dtype, torch.float32)
        weight = self.averaging_constant
        return mine.to(precise) * (1 - weight) + new.to(precise) * weight
