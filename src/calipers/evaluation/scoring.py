"""How well logits predict, and how far outputs of layers are from those of the float model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from calipers.calibration.data import Batch, counted_tokens
from calipers.judging.losses import token_errors
from calipers.topology.model import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_AT_ONCE = 1 << 24
"""How many logits are looked at in float32 at a time."""


def score(logits: Tensor, batch: Batch, base: Tensor | None = None) -> dict[str, Tensor]:
    """Return what each row of a batch adds: (rows,) float64 each.

    ``tokens`` are those that were predicted; of them, ``nll`` is the sum of −log q, ``kl`` that of
    KL(p‖q), and ``agreed`` counts where p and q have the same favourite. q are the probabilities
    of ``logits``, p those of ``base``; the last two are only there with it.
    """
    names = ("tokens", "nll") if base is None else ("tokens", "nll", "kl", "agreed")
    totals = {name: torch.zeros(len(logits), dtype=torch.float64) for name in names}
    # All tokens but the first are predicted from one before them, if that is no padding.
    predicted = (batch["attention_mask"][:, :-1] != 0) & (counted_tokens(batch)[:, 1:] != 0)
    for row, mask in enumerate(predicted):
        places = mask.nonzero().squeeze(1)
        for some in torch.split(places, max(1, _AT_ONCE // logits.shape[-1])):
            targets = batch["input_ids"][row][some + 1]
            of_base = None if base is None else base[row][some]
            for name, total in _score_tokens(logits[row][some], targets, of_base).items():
                totals[name][row] += total
    return totals


def _score_tokens(logits: Tensor, targets: Tensor, base: Tensor | None) -> dict[str, Tensor]:
    log_q = logits.float().log_softmax(-1)
    chosen = log_q.gather(-1, targets.to(log_q.device)[:, None])
    found = {"tokens": torch.tensor(float(len(targets))), "nll": -chosen.double().sum()}
    if base is not None:
        log_p = base.float().log_softmax(-1)
        p = log_p.exp()
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
        found["kl"] = terms.sum(-1).double().sum()
        found["agreed"] = (base.argmax(-1) == logits.argmax(-1)).sum()
    return {name: total.double().cpu() for name, total in found.items()}


@dataclass(frozen=True)
class LayerError:
    """‖h′ − h‖ / ‖h‖ of the outputs of a layer, on average over tokens.

    :param own: what the layer itself adds: its inputs are those of the float model
    :param output: what has come together at its output while the quantized model runs
    """

    layer: str
    own: float
    output: float


class LayerComparison:
    """Compares the layers of two models of one shape while both run, batch by batch."""

    def __init__(self, base: PreTrainedModel, other: PreTrainedModel) -> None:
        self._models = base, other
        found = decoder_layers(base)
        self._names, self._base = list(found), list(found.values())
        self._other = list(decoder_layers(other).values())
        self._outputs: dict[int, Tensor] = {}
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64)
        self._tokens = 0

    @contextmanager
    def other_runs(self) -> Iterator[None]:
        """While this is open, the other model runs a batch."""

        def keep(number: int, _args: Any, _kwargs: Any, output: Tensor) -> None:
            self._outputs[number] = output

        with _calling(self._other, keep):
            yield

    @contextmanager
    def base_runs(self, mask: Tensor) -> Iterator[None]:
        """While this is open, the float model runs the same batch, after the other one."""

        def compare(number: int, args: Any, kwargs: Any, output: Tensor) -> None:
            again = _hidden(self._other[number].forward(*self._cast(args), **self._cast(kwargs)))
            counts = (mask != 0).to(output.device)
            for place, hidden in enumerate((again, self._outputs.pop(number))):
                errors = token_errors(hidden.to(output.device)[counts], output[counts])
                self._sums[number, place] += float(errors.sum())

        self._tokens += int((mask != 0).sum())
        with _calling(self._base, compare):
            yield

    def _cast(self, inputs: Any) -> Any:
        """Return inputs of the float model in the dtype in which the other one computes."""
        base, other = (model.dtype for model in self._models)
        return tree_map_only(
            Tensor, lambda each: each.to(other) if each.dtype == base else each, inputs
        )

    def errors(self) -> tuple[LayerError, ...]:
        """Return the errors of all layers, in order."""
        means = (self._sums / max(1, self._tokens)).tolist()
        return tuple(
            LayerError(name, own, output)
            for name, (own, output) in zip(self._names, means, strict=True)
        )


@contextmanager
def _calling(
    layers: Sequence[nn.Module], tell: Callable[[int, Any, Any, Tensor], None]
) -> Iterator[None]:
    """Tell what goes into each layer and what comes out of it."""

    def hook(number: int) -> Callable[..., None]:
        return lambda _, args, kwargs, output: tell(number, args, kwargs, _hidden(output))

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            handle = layer.register_forward_hook(hook(number), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _hidden(output: Any) -> Tensor:
    """The hidden states: all that a layer returns, or the first of it."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found
