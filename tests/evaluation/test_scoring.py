"""Perplexity, divergence and agreement, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from calipers.evaluation.scoring import score

VOCABULARY = 11


def batch_of(*lengths: int, side: str = "right") -> dict[str, torch.Tensor]:
    width = max(lengths)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, slice(0, length) if side == "right" else slice(width - length, width)] = 1
    return {"input_ids": torch.randint(VOCABULARY, mask.shape), "attention_mask": mask}


def by_definition(
    logits: torch.Tensor, base: torch.Tensor, batch: dict[str, torch.Tensor], row: int
) -> dict[str, float]:
    """Token by token, in float64."""
    found = {"tokens": 0.0, "nll": 0.0, "kl": 0.0, "agreed": 0.0}
    places = batch["attention_mask"][row].nonzero().flatten().tolist()
    for place in places[:-1]:
        q = torch.softmax(logits[row, place].double(), -1)
        p = torch.softmax(base[row, place].double(), -1)
        found["tokens"] += 1
        found["nll"] -= float(q[batch["input_ids"][row, place + 1]].log())
        found["kl"] += sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True) if a > 0)
        found["agreed"] += float(p.argmax() == q.argmax())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("at_once", [1, 3 * VOCABULARY, 1 << 24])
def test_against_the_definition(
    side: str, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calipers.evaluation.scoring._AT_ONCE", at_once)
    batch = batch_of(7, 1, 4, 2, side=side)
    base = (torch.randn(4, 7, VOCABULARY) * 3).to(dtype)
    logits = (base.float() + 3 * torch.randn(4, 7, VOCABULARY)).to(dtype)
    found = score(logits, batch, base)
    assert 0 < found["agreed"].sum() < found["tokens"].sum() == 10
    for row in range(4):
        for name, expected in by_definition(logits, base, batch, row).items():
            assert float(found[name][row]) == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def test_a_model_beside_itself() -> None:
    batch, logits = batch_of(5, 5), torch.randn(2, 5, VOCABULARY)
    found = score(logits, batch, logits)
    assert found["kl"].tolist() == [0, 0]
    assert torch.equal(found["agreed"], found["tokens"])


def test_without_another_model() -> None:
    batch, logits = batch_of(5, 3), torch.randn(2, 5, VOCABULARY)
    alone, both = score(logits, batch), score(logits, batch, torch.randn(2, 5, VOCABULARY))
    assert alone.keys() == {"tokens", "nll"}
    assert all(torch.equal(alone[name], both[name]) for name in alone)


def test_tokens_that_cannot_come_do_not_count() -> None:
    """A logit of −Inf in the float model has no part in the divergence."""
    batch, base = batch_of(3), torch.randn(1, 3, VOCABULARY)
    base[..., 4] = -torch.inf
    batch["input_ids"][:] = 1
    found = score(torch.randn(1, 3, VOCABULARY), batch, base)
    assert found["kl"].isfinite().all()
    assert found["kl"].item() > 0
