"""How well logits predict the next token, and how far they are from those of the float model."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.calibration.data import Batch, counted_tokens

_AT_ONCE = 1 << 24
"""How many logits are looked at in float32 at a time."""


def score(logits: Tensor, batch: Batch, base: Tensor | None = None) -> dict[str, Tensor]:
    """Return what each row of a batch adds: (rows,) float64 each.

    ``tokens`` are those that were predicted; of them, ``nll`` is the sum of −log q, ``kl`` that of
    KL(p‖q), and ``agreed`` counts where p and q have the same favourite. q are the probabilities
    of ``logits``, p those of ``base``; the last two are only there with it.
    """
    rows = [
        _score_row(
            logits[row], batch["input_ids"][row], predicted, None if base is None else base[row]
        )
        for row, predicted in enumerate(_predicted(batch))
    ]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _predicted(batch: Batch) -> Tensor:
    """Return which tokens but the first are predicted from one before them, and count."""
    mask = batch["attention_mask"] != 0
    return mask[:, :-1] & (counted_tokens(batch)[:, 1:] != 0)


def _score_row(
    logits: Tensor, ids: Tensor, predicted: Tensor, base: Tensor | None
) -> dict[str, Tensor]:
    places = predicted.nonzero().squeeze(1)
    zero = torch.zeros((), dtype=torch.float64)
    names = ("tokens", "nll") if base is None else ("tokens", "nll", "kl", "agreed")
    totals = dict.fromkeys(names, zero)
    for some in torch.split(places, max(1, _AT_ONCE // logits.shape[-1])):
        found = _score_tokens(logits[some], ids[some + 1], None if base is None else base[some])
        totals = {name: total + found[name] for name, total in totals.items()}
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
